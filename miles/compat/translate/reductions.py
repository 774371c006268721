"""Reduce token losses to the loss of a step as other trainers do, in plain floats. Each is linear in the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from miles.compat.translate.examples import LONGEST, Response, Step

Reduction = Callable[[Step], float]


def token_mean(step: Step) -> float:
    """Divide by the tokens of the whole step."""
    return _total(step.responses) / max(step.tokens, 1)


def token_mean_of_generation(step: Step) -> float:
    """Divide by the average number of tokens of a step of the generation batch."""
    return _total(step.responses) / step.generation_tokens


def token_mean_counting_masked(step: Step) -> float:
    """Divide by the tokens of the whole step, with one more for each fully masked response."""
    return _total(step.responses) / sum(max(response.tokens, 1) for response in step.responses)


def token_mean_of_micro_batches(step: Step) -> float:
    """Average the token means of the micro-batches, over accumulation and ranks."""
    return _mean([_token_mean(micro) for micro in step.micro_batches])


def token_mean_of_ranks(step: Step) -> float:
    """Average the token means of the ranks."""
    return _mean([_token_mean(rank) for rank in step.of_ranks])


def sequence_mean(step: Step) -> float:
    """Average the means of all responses; a fully masked one counts as 0."""
    return _mean([_token_mean([response]) for response in step.responses])


def sequence_mean_of_unmasked(step: Step) -> float:
    """Average the means of the responses that have a loss token."""
    return _mean([_token_mean([response]) for response in step.responses if response.tokens])


def sequence_mean_of_unmasked_in_micro_batches(step: Step) -> float:
    """Average, over micro-batches, the mean of the responses that have a loss token."""
    return _mean([_mean([_token_mean([r]) for r in micro if r.tokens]) for micro in step.micro_batches])


def token_sum(step: Step) -> float:
    """Add up all token losses."""
    return _total(step.responses)


def sequence_sum_mean(step: Step) -> float:
    """Average the sums of all responses."""
    return _total(step.responses) / len(step.responses)


def sequence_sum_mean_of_unmasked_in_micro_batches(step: Step) -> float:
    """Average, over micro-batches, the mean sum of the responses that have a loss token."""
    return _mean([_mean([r.total for r in micro if r.tokens]) for micro in step.micro_batches])


def over_longest(reduction: Reduction) -> Reduction:
    """Divide further by the maximal length L, which is 8 in the examples."""
    return lambda step: reduction(step) / LONGEST


def over_padded_width(step: Step) -> float:
    """Average the sums of all responses, each divided by the longest response of its micro-batch."""
    parts = [_total(micro) / max(max(r.tokens for r in micro), 1) for micro in step.micro_batches]
    return sum(parts) / len(step.responses)


def token_weights(reduction: Reduction, step: Step) -> list[float]:
    """Return the weight that ``reduction`` gives to a token of each response; 0 for a fully masked one."""
    weights = []
    for place, response in enumerate(step.responses):
        losses = tuple(replace(other, loss=float(number == place)) for number, other in enumerate(step.responses))
        weights.append(reduction(replace(step, responses=losses)) / response.tokens if response.tokens else 0.0)
    return weights


def distance(one: Reduction, other: Reduction, step: Step) -> float:
    """Return how much weight two reductions of a step give to different tokens: the sum of absolute differences."""
    pairs = zip(step.responses, token_weights(one, step), token_weights(other, step), strict=True)
    return sum(response.tokens * abs(a - b) for response, a, b in pairs)


def _total(responses: Sequence[Response]) -> float:
    return sum(response.total for response in responses)


def _token_mean(responses: Sequence[Response]) -> float:
    return _total(responses) / max(sum(response.tokens for response in responses), 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
