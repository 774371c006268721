"""The user's own way to collect an iteration: ``--rollout-function-path``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from miles.base.user_code.loading import load_function
from miles.config.rollout import RolloutArguments
from miles.engine.base import Engine
from miles.rollout.collect import PromptSource, ScoredGroups
from miles.rollout.groups import ProducedGroup
from miles.rollout.metrics import rollout_metrics
from miles.tasks.rewards.base import RewardFunction
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import PromptGroup

_FLAG = "--rollout-function-path"


@dataclass(frozen=True)
class RolloutTools:
    """What a rollout function works with.

    ``stream.draw(n)`` returns n prompts. Awaiting ``make_group(drawn)`` produces one scored group of
    ``--n-samples-per-prompt`` trajectories, as the built-in collector does; it is in the ``group`` of the result. The
    other attributes are for functions that generate or score groups themselves.
    """

    stream: PromptSource
    make_group: Callable[[PromptGroup], Awaitable[ProducedGroup]]
    engine: Engine
    tokenizer: Any
    reward_function: RewardFunction
    rollout: RolloutArguments
    reward: RewardArguments


class RolloutFunction(Protocol):
    """Returns the scored groups of one iteration, ``--rollout-batch-size`` of them.

    To report metrics of its own, it returns a ``miles.rollout.collect.Rollout(groups, metrics)``.
    """

    async def __call__(self, iteration: int, tools: RolloutTools) -> list[PromptGroup] | ScoredGroups:
        """Return the groups of ``iteration``, counted from 0."""
        ...


def load_rollout_function(path: str) -> RolloutFunction:
    """Return the function named by ``--rollout-function-path``.

    Raises:
        ValueError: The path cannot be imported.
    """
    function: RolloutFunction = load_function(path, _FLAG)
    return function


class FunctionCollector:
    """A ``GroupCollector`` that calls the user's function and checks its result."""

    def __init__(self, path: str, function: RolloutFunction, tools: RolloutTools) -> None:
        self._path = path
        self._function = function
        self._tools = tools

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the function's groups and metrics.

        Raises:
            ValueError: The result is not what ``RolloutFunction`` describes.
            Exception: Whatever the function raises.
        """
        answer: Any = await self._function(iteration, self._tools)
        groups = answer.groups if isinstance(answer, ScoredGroups) else answer
        self._check(groups, iteration)
        metrics = rollout_metrics(groups, groups, 0, self._tools.reward.log_passrate)
        if isinstance(answer, ScoredGroups):
            return ScoredGroups(groups, metrics | answer.metrics, answer.generated)
        return ScoredGroups(groups, metrics)

    def state(self) -> dict[str, Any]:
        """Return the stream's position: between two iterations the function must not hold prompts back."""
        return self._tools.stream.state()

    def weights_changed(self, version: int) -> None:
        """Do nothing: each iteration is generated with the weights that the engine has."""

    def _check(self, groups: Any, iteration: int) -> None:
        at = f"{_FLAG} {self._path}: iteration {iteration}"
        if not isinstance(groups, list) or not all(isinstance(group, PromptGroup) for group in groups):
            raise ValueError(
                f"{at} is {groups!r:.80}; return a list of miles.types.sample.PromptGroup, or a Rollout of it"
            )
        wanted, per_group = self._tools.rollout.rollout_batch_size, self._tools.rollout.n_samples_per_prompt
        if len(groups) != wanted:
            raise ValueError(f"{at} has {len(groups)} groups; return as many as --rollout-batch-size {wanted}")
        for group in groups:
            trajectories = {sample.trajectory_id for sample in group.samples}
            if len(trajectories) + group.dropped_trajectories != per_group or None in trajectories:
                raise ValueError(
                    f"{at}: group {group.group_index} has the trajectory_ids {sorted(map(str, trajectories))}; give it "
                    f"--n-samples-per-prompt {per_group} trajectories, each with its own id"
                )
            if any(sample.reward is None for sample in group.samples):
                raise ValueError(f"{at}: group {group.group_index} has samples without a reward; score every sample")
            for sample in group.samples:
                sample.check()
