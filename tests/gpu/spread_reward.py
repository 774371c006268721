"""A reward under which the samples of a group differ, whatever model has written them."""

from __future__ import annotations

from miles.types.sample import Sample


def spread(samples: list[Sample]) -> list[float]:
    return [sum(sample.response_ids) % 7 / 7 for sample in samples]
