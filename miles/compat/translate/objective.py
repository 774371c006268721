"""Describe another trainer's aggregation, and find our mode that computes it or comes nearest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from miles.objective.aggregation import MODES, Aggregation, step_denominators

# A small optimizer step on which objectives are compared: an uneven one that is split.


LONGEST = 8  # the longest response: L, and the padded width


@dataclass(frozen=True)
class Response:
    """Hold one response: its prompt, its loss tokens, and the loss that each of them has."""

    prompt: int
    tokens: int
    loss: float

    @property
    def total(self) -> float:
        """The sum of its token losses, S_i."""
        return self.tokens * self.loss


@dataclass(frozen=True)
class Step:
    """Hold one optimizer step.

    Attributes:
        name: Its name in the report.
        responses: All of its responses.
        ranks: For each rank its micro-batches, each with the positions of its responses.
        generation_tokens: Loss tokens of the whole generation batch, divided by its number of steps.
    """

    name: str
    responses: tuple[Response, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    generation_tokens: float

    @property
    def micro_batches(self) -> list[list[Response]]:
        """The micro-batches of all ranks."""
        return [[self.responses[place] for place in micro] for rank in self.ranks for micro in rank]

    @property
    def of_ranks(self) -> list[list[Response]]:
        """The responses of each rank."""
        return [[self.responses[place] for micro in rank for place in micro] for rank in self.ranks]

    @property
    def tokens(self) -> int:
        """The loss tokens of the step, T."""
        return sum(response.tokens for response in self.responses)


# Both prompts are on both ranks, and no two micro-batches have as many tokens. One response is fully masked.
UNEVEN = Step(
    "uneven batch",
    (
        Response(0, 1, 1.0),
        Response(0, 2, 1.0),
        Response(0, 3, 1.0),
        Response(0, 0, 0.0),
        Response(1, 8, -0.5),
        Response(1, 6, 0.5),
        Response(1, 8, -0.5),
        Response(1, 4, 1.0),
    ),
    (((0, 4), (1, 2)), ((3, 5), (6, 7))),
    40.0,  # a second step of the same generation has 48 tokens: (32 + 48) / 2
)


def our_value(mode: Aggregation, step: Step, divisor: float | None) -> float:
    """Compute our objective of ``step`` from the denominators that training uses."""
    found = step_denominators(
        mode,
        token_counts=[response.tokens for response in step.responses],
        trajectory_ids=range(len(step.responses)),
        group_indices=[response.prompt for response in step.responses],
        divisor=divisor,
    )
    parts = (r.total / denominator for r, denominator in zip(step.responses, found.sample_denoms, strict=True))
    return sum(parts) / found.num_trajectories


# Reduce token losses to the loss of a step as other trainers do, in plain floats. Each is linear in the losses.


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


def token_sum(step: Step) -> float:
    """Add up all token losses."""
    return _total(step.responses)


def sequence_sum_mean(step: Step) -> float:
    """Average the sums of all responses."""
    return _total(step.responses) / len(step.responses)


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


@dataclass(frozen=True)
class Objective:
    """Describe the aggregation that a configuration asks for.

    Attributes:
        setting: The setting that asks for it.
        formula: The sum that the gradient of a step is, after the framework's own averaging.
        source: Version or commit, and source file.
        reduce: The formula, in plain floats.
        mode: Our mode, and the words that ask for it.
        divisor: L of ``constant`` in the examples; ``None`` for 1/N, the N of each example.
        words: The flags that ask for our mode.
        depends: What changes the result there alongside the batch; empty if nothing does.
        exact: Whether our mode computes the same, whatever the batch.
    """

    setting: str
    formula: str
    source: str
    reduce: Reduction
    mode: Aggregation
    words: tuple[str, ...]
    divisor: float | None = float(LONGEST)
    depends: str = ""
    exact: bool = True

    @property
    def our_formula(self) -> str:
        """Our mode's formula."""
        return MODES[self.mode].formula

    def ours(self, mode: Aggregation) -> Reduction:
        """Return one of our modes as a reduction, with this objective's divisor."""
        if self.divisor is None:
            return lambda step: our_value(mode, step, 1 / len(step.responses))
        return partial(_ours, mode, self.divisor)

    def nearest(self) -> Aggregation:
        """Return our mode whose token weights are nearest in the uneven batch."""
        return min(MODES, key=lambda mode: distance(self.reduce, self.ours(mode), UNEVEN))


def _ours(mode: Aggregation, divisor: float, step: Step) -> float:
    return our_value(mode, step, divisor)
