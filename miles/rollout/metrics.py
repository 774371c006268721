"""Compute the metrics of an iteration's samples: rewards, lengths, pass@k, and the age of their weights."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from numbers import Real
from statistics import stdev
from typing import Any

from miles.rollout.filters import differ, has_reward_spread
from miles.tasks.rewards.registry import passes_of
from miles.types.metrics import Metric
from miles.types.sample import NO_WEIGHTS, PromptGroup, Sample, SampleStatus, exact_mean, in_trajectories


def rollout_metrics(
    groups: Sequence[PromptGroup], generated: Sequence[PromptGroup], reward_errors: int, log_passrate: bool
) -> dict[str, Metric]:
    """Return the metrics ``rollout/…`` of one iteration.

    Args:
        groups: The groups that are trained on. Their trajectories give reward, reward_parts/NAME and reward_std
            (unbiased, within a group, averaged over groups), their samples the lengths of prompts and responses in
            tokens, and the truncated and aborted fractions. There are also metrics of each set of a mixture, and
            greedy_reward if greedy responses were generated.
        generated: All groups, so that a filter does not bias zero_std_groups (a fraction), pass@k and tokens (a total,
            of greedy responses too).
        reward_errors: Samples that the reward function failed on. dropped_trajectories counts those that kept groups
            have lost by it (--reward-error drop).
        log_passrate: Whether to report pass@k.
    """
    samples = [sample for group in groups for sample in group.samples]
    by_group = [group.trajectory_rewards for group in groups]
    scored = [group for group in generated if group.samples]  # others have no rewards
    tokens = sum(len(sample.response_ids) for group in scored for sample in group.samples)
    metrics = {
        "reward": Metric.mean(reward for rewards in by_group for reward in rewards),
        **reward_part_metrics(samples),
        **prompt_set_metrics(groups),
        "reward_std": Metric.mean(stdev(rewards) if differ(rewards) else 0.0 for rewards in by_group),
        "prompt_length": Metric.mean(len(s.prompt.token_ids) for s in samples),
        **response_metrics(samples),
        "zero_std_groups": Metric.mean(not has_reward_spread(group) for group in scored),
        "tokens": Metric(tokens + sum(group.baseline_tokens for group in generated), 1.0),
        "reward_errors": Metric(reward_errors, 1.0),
    }
    baselines = [group.baseline_reward for group in groups if group.baseline_reward is not None]
    if baselines:
        metrics["greedy_reward"] = Metric.mean(baselines)
    dropped = sum(group.dropped_trajectories for group in groups)
    if dropped:
        metrics["dropped_trajectories"] = Metric(dropped, 1.0)
    if log_passrate:
        metrics |= pass_at_k_metrics(map(passes_of, generated))
    return {f"rollout/{name}": metric for name, metric in metrics.items()}


def response_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return means over samples, without a prefix.

    These are response_length in tokens, and the fractions of samples that were truncated or aborted, or where
    something was appended to the model's output (by a tool, an environment, or an interruption of the reasoning).
    """
    return {
        "response_length": Metric.mean(len(s.response_ids) for s in samples),
        "truncated_fraction": Metric.mean(s.status is SampleStatus.TRUNCATED for s in samples),
        "aborted_fraction": Metric.mean(s.status is SampleStatus.ABORTED for s in samples),
        "appended_fraction": Metric.mean(NO_WEIGHTS in s.weight_versions for s in samples),
    }


def reward_part_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Return ``reward_parts/NAME``: means of the parts of a weighted sum, over the trajectories that have them."""
    parts: dict[str, list[float]] = {}
    for trajectory in in_trajectories(samples):
        for name in dict.fromkeys(name for sample in trajectory for name in sample.reward_parts):
            values = (sample.reward_parts[name] for sample in trajectory if name in sample.reward_parts)
            parts.setdefault(name, []).append(exact_mean(values))
    return {f"reward_parts/{name}": Metric.mean(values) for name, values in parts.items()}


def prompt_set_metrics(all_groups: Sequence[PromptGroup]) -> dict[str, Metric]:
    """Return ``prompts/NAME``, ``reward/NAME`` and ``response_length/NAME`` of each set of a mixture that was drawn."""
    metrics: dict[str, Metric] = {}
    for name in dict.fromkeys(group.prompt.prompt_set for group in all_groups if group.prompt.prompt_set):
        groups = [group for group in all_groups if group.prompt.prompt_set == name]
        metrics[f"prompts/{name}"] = Metric(len(groups))
        metrics[f"reward/{name}"] = Metric.mean(reward for group in groups for reward in group.trajectory_rewards)
        lengths = (len(sample.response_ids) for group in groups for sample in group.samples)
        metrics[f"response_length/{name}"] = Metric.mean(lengths)
    return metrics


def staleness_metrics(groups: Sequence[PromptGroup], trained_version: int) -> dict[str, Metric]:
    """Return how old the weights of the loss tokens are.

    ``rollout/staleness`` and ``rollout/staleness_max`` are the mean and the maximum over tokens, in weight versions
    behind ``trained_version`` (the version that trains on them). ``rollout/mixed_version_samples`` is the fraction of
    samples that several versions generated.
    """
    samples = [sample for group in groups for sample in group.samples]
    tokens: Counter[tuple[int, int]] = Counter()  # by (version, loss mask); counted in C, since there are millions
    for sample in samples:
        tokens.update(zip(sample.weight_versions, sample.loss_mask, strict=False))  # versions may not be recorded
    behind = {trained_version - v: n for (v, mask), n in tokens.items() if mask and v != NO_WEIGHTS}
    mixed = [len(set(sample.weight_versions) - {NO_WEIGHTS}) > 1 for sample in samples]
    return {
        "rollout/staleness": Metric(sum(age * n for age, n in behind.items()), sum(behind.values())),
        "rollout/staleness_max": Metric(max(behind, default=0), 1.0),
        "rollout/mixed_version_samples": Metric.mean(mixed),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that at least one of k responses to a prompt passes, given ``c`` passes in ``n`` responses.

    This is the unbiased estimate 1 - C(n-c, k) / C(n, k) (Chen et al., arXiv 2107.03374).

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} passes in {n} responses is not defined"
    return 1.0 - comb(n - c, k) / comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """Return 1, 2, 4, … up to and including ``n``."""
    return [1 << i for i in range(n.bit_length())]


def pass_at_k_metrics(passes_by_prompt: Iterable[Sequence[bool]]) -> dict[str, Metric]:
    """Return ``pass@1``, ``pass@2``, ``pass@4``, …: means over the prompts that have at least k responses."""
    metrics: dict[str, Metric] = {}
    for passed in passes_by_prompt:
        for k in powers_of_two(len(passed)):
            name = f"pass@{k}"
            estimate = Metric(pass_at_k(len(passed), sum(passed), k), 1.0)
            metrics[name] = metrics[name] + estimate if name in metrics else estimate
    return metrics


def with_own_metrics(
    metrics: Mapping[str, Metric], log: Callable[[dict[str, Any]], Any], name: str
) -> dict[str, Metric]:
    """Return ``metrics`` with the metrics that the user's function adds; only the latter if it returns true.

    It returns true if it has logged the others itself.

    Args:
        metrics: The metrics.
        log: The function. It is given their values by name, and may add to them or replace some.
        name: Its name in errors.

    Raises:
        ValueError: It adds something other than a finite number.
    """
    values = {metric: entry.value for metric, entry in metrics.items()}
    extra: dict[str, Any] = dict(values)
    replaces = bool(log(extra))
    added = {metric: value for metric, value in extra.items() if metric not in values or value is not values[metric]}
    for metric, value in added.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name}: the metric {metric} is {value!r:.80}; give finite numbers, or leave it out")
    user_metrics = {metric: Metric(float(value), 1.0) for metric, value in added.items()}
    return user_metrics if replaces else {**metrics, **user_metrics}
