"""Evaluation on held-out sets: the same seeds every time, so that two evaluations differ by the weights only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from miles.arguments.reward import RewardArguments
from miles.concurrency import gather_or_cancel
from miles.engine.base import Engine
from miles.metrics import Metric
from miles.rewards.base import RewardFunction
from miles.rewards.scoring import score
from miles.rollout.eval_sets import EvalSet
from miles.rollout.generate import Detokenizer, GroupGenerator, generate_group, response_seed
from miles.rollout.pass_at_k import pass_at_k_metrics
from miles.rollout.rollout_metrics import response_metrics
from miles.sample import PromptGroup, Sample


async def evaluate(
    eval_sets: Sequence[EvalSet],
    engine: Engine,
    tokenizer: Detokenizer,
    reward_function: RewardFunction,
    reward: RewardArguments,
    seed: int,
    generate: GroupGenerator = generate_group,
) -> tuple[dict[str, Metric], list[Sample]]:
    """Metrics of every set, and all scored samples in the order of sets, prompts and seeds.

    ``eval/<name>/…``: accuracy (the mean reward), response_length, truncated_fraction, aborted_fraction, reward_errors
    and, with more than one sample a prompt, pass@k for powers of two. The prompts of all sets are in flight together.
    """
    per_set = await gather_or_cancel(
        _evaluate_set(eval_set, engine, tokenizer, reward_function, reward, seed, generate) for eval_set in eval_sets
    )
    metrics: dict[str, Metric] = {}
    samples: list[Sample] = []
    for set_metrics, set_samples in per_set:
        metrics |= set_metrics
        samples += set_samples
    return metrics, samples


async def _evaluate_set(
    eval_set: EvalSet,
    engine: Engine,
    tokenizer: Detokenizer,
    reward_function: RewardFunction,
    reward: RewardArguments,
    seed: int,
    generate: GroupGenerator,
) -> tuple[dict[str, Metric], list[Sample]]:
    seed_of = partial(response_seed, seed, "eval", eval_set.name)

    async def generate_and_score(drawn: PromptGroup) -> tuple[PromptGroup, int]:
        group = await generate(
            drawn,
            engine,
            eval_set.sampling,
            tokenizer,
            n_samples=eval_set.samples_per_prompt,
            seed_of=seed_of,
            max_context_len=eval_set.max_context_len,
        )
        return group, await score(group.samples, reward_function, reward.reward_error_value)

    drawn = [PromptGroup(i, prompt) for i, prompt in enumerate(eval_set.prompts)]
    scored = await gather_or_cancel(generate_and_score(group) for group in drawn)
    groups = [group for group, _ in scored]
    samples = [sample for group in groups for sample in group.samples]
    metrics = {
        "accuracy": Metric.mean(value for group in groups for value in group.rewards),
        **response_metrics(samples),
        "reward_errors": Metric(sum(errors for _, errors in scored), 1.0),
    }
    if eval_set.samples_per_prompt > 1:
        metrics |= pass_at_k_metrics(group.rewards for group in groups)
    return {f"eval/{eval_set.name}/{name}": metric for name, metric in metrics.items()}, samples
