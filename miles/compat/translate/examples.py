"""Two small optimizer steps on which objectives are compared: the worked example, and an uneven one that is split."""

from __future__ import annotations

from dataclasses import dataclass

from miles.objective.aggregation import Aggregation, step_denominators

LONGEST = 8  # the longest response in both examples: L, and the padded width


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
        ranks: For each rank its micro-batches, each with the places of its responses.
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


# docs/loss-aggregation.md: every token of trajectory 1 has loss 1, all others 0.
WORKED = Step(
    "worked example",
    (Response(0, 2, 1.0), Response(0, 6, 0.0), Response(1, 4, 0.0), Response(1, 8, 0.0)),
    (((0, 1, 2, 3),),),
    20.0,
)

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

STEPS = (WORKED, UNEVEN)


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
