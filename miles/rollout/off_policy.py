"""Tokens that older weights generated than those that are trained: found, masked, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from miles.metrics import Metric
from miles.sample import NO_WEIGHTS, PromptGroup, Sample


def trained_versions(sample: Sample) -> Iterator[int]:
    """The version of the weights behind each token of loss mask 1, as far as it was recorded."""
    for version, mask in zip(sample.weight_versions, sample.loss_mask, strict=False):  # no version where none is known
        if mask and version != NO_WEIGHTS:
            yield version


def is_older(group: PromptGroup, version: int) -> bool:
    """Whether a token that would be trained on is by weights older than ``version``."""
    return any(found < version for sample in group.samples for found in trained_versions(sample))


def is_wholly_older(group: PromptGroup, version: int) -> bool:
    """Whether every token that would be trained on is by weights older than ``version``."""
    found = [found for sample in group.samples for found in trained_versions(sample)]
    return bool(found) and max(found) < version


def mask_older(group: PromptGroup, version: int) -> int:
    """Set the loss mask of tokens by weights older than ``version`` to 0; returns how many there were."""
    masked = 0
    for sample in group.samples:
        for position, found in enumerate(sample.weight_versions):
            if sample.loss_mask[position] and NO_WEIGHTS != found < version:
                sample.loss_mask[position] = 0
                masked += 1
    return masked


def staleness_metrics(groups: Sequence[PromptGroup], trained_version: int) -> dict[str, Metric]:
    """How far behind ``trained_version``, that of the weights to be trained, the tokens of the loss are.

    ``rollout/staleness`` and ``rollout/staleness_max`` in weight versions, mean and greatest over tokens;
    ``rollout/mixed_version_samples``, the fraction of samples that several versions generated.
    """
    samples = [sample for group in groups for sample in group.samples]
    tokens: Counter[tuple[int, int]] = Counter()  # by (version, loss mask); counted in C, since there are millions
    for sample in samples:
        tokens.update(zip(sample.weight_versions, sample.loss_mask, strict=False))  # no version where none is known
    behind = {trained_version - v: n for (v, mask), n in tokens.items() if mask and v != NO_WEIGHTS}
    mixed = [len(set(sample.weight_versions) - {NO_WEIGHTS}) > 1 for sample in samples]
    return {
        "rollout/staleness": Metric(sum(age * n for age, n in behind.items()), sum(behind.values())),
        "rollout/staleness_max": Metric(max(behind, default=0), 1.0),
        "rollout/mixed_version_samples": Metric.mean(mixed),
    }
