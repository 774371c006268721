"""Which way rollouts are made, as the flags say."""

from __future__ import annotations

from typing import Any

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.engine.base import Engine
from miles.rewards.base import RewardFunction
from miles.rollout.collect import Collector, PromptSource, RolloutSource
from miles.rollout.generate import GroupGenerator
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.rollout.produce_group import GroupMaker
from miles.rollout.rollout_function import FunctionCollector, RolloutTools
from miles.rollout.stream_collector import StreamCollector, StreamPlan


def build_source(
    stream: PromptSource,
    engine: Engine,
    tokenizer: Any,
    reward_function: RewardFunction,
    rollout: RolloutArguments,
    reward: RewardArguments,
    seed: int,
    generate: GroupGenerator,
    num_iterations: int,
) -> RolloutSource:
    """The user's rollout function, groups as they complete, or bursts that are awaited.

    Raises ``ValueError`` for a function that cannot be imported.
    """
    interruptible = InterruptibleEngine(engine) if rollout.partial_rollout else None
    make_group = GroupMaker(interruptible or engine, tokenizer, reward_function, rollout, reward, seed, generate)
    if rollout.rollout_function_path is not None:
        tools = RolloutTools(stream, make_group, engine, tokenizer, reward_function, rollout, reward)
        return FunctionCollector(rollout.rollout_function_path, tools)
    plan = StreamPlan.of(rollout)
    if plan is None:
        return Collector(stream, make_group, rollout, reward)
    return StreamCollector(
        stream,
        make_group,
        rollout,
        reward,
        plan,
        num_iterations=num_iterations,
        engine=engine,
        interruptible=interruptible,
    )
