"""What a rollout reports about itself."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import stdev

from miles.metrics import Metric
from miles.rollout.filters import has_reward_spread
from miles.rollout.pass_at_k import pass_at_k_metrics
from miles.sample import PromptGroup, Sample, SampleStatus


def response_metrics(samples: Sequence[Sample]) -> dict[str, Metric]:
    """Means over samples, named without prefix: response_length in tokens, truncated_fraction, aborted_fraction."""
    return {
        "response_length": Metric.mean(len(s.response_ids) for s in samples),
        "truncated_fraction": Metric.mean(s.status is SampleStatus.TRUNCATED for s in samples),
        "aborted_fraction": Metric.mean(s.status is SampleStatus.ABORTED for s in samples),
    }


def rollout_metrics(
    kept: Sequence[PromptGroup], generated: Sequence[PromptGroup], reward_errors: int, log_passrate: bool
) -> dict[str, Metric]:
    """``rollout/…`` of one rollout.

    Of the groups ``kept`` for training: reward, reward_std (unbiased, within a group, mean over groups), response and
    prompt lengths in tokens, truncated and aborted fractions. Of all groups ``generated``, so that a filter does not
    colour them: zero_std_groups (fraction), pass@k, tokens and reward_errors (totals).
    """
    samples = [sample for group in kept for sample in group.samples]
    metrics = {
        "reward": Metric.mean(reward for group in kept for reward in group.rewards),
        "reward_std": Metric.mean(_reward_std(group) for group in kept),
        "prompt_length": Metric.mean(len(s.prompt.token_ids) for s in samples),
        **response_metrics(samples),
        "zero_std_groups": Metric.mean(not has_reward_spread(group) for group in generated),
        "tokens": Metric(sum(len(s.response_ids) for group in generated for s in group.samples), 1.0),
        "reward_errors": Metric(reward_errors, 1.0),
    }
    if log_passrate:
        metrics |= pass_at_k_metrics(group.rewards for group in generated)
    return {f"rollout/{name}": metric for name, metric in metrics.items()}


def _reward_std(group: PromptGroup) -> float:
    return stdev(group.rewards) if has_reward_spread(group) else 0.0
