"""Two prompts whose responses can be listed, so that an expected gradient is a finite sum.

A response is a path of up to three tokens: *continue* or *stop*. Its four forms have 1, 2, 3 and 3 tokens. The policy
has one parameter for each prompt and place, the log-odds to continue, so six in all. A step draws a group of four
responses for each prompt: 35 multisets each, 1225 steps in all, each with a probability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product
from math import factorial, prod

import numpy as np

PROMPTS, PLACES, GROUP = 2, 3, 4
RESPONSES = ((0,), (1, 0), (1, 1, 0), (1, 1, 1))  # 1 continues, 0 stops
# Right answers: long ones of the first prompt, and short and long ones of the second.
RIGHT = np.array([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
SHORT = np.array([[1.0, 1.0, 0.0, 0.0]] * PROMPTS)  # a second reward, for gdpo
POLICY = np.array([[0.2, -0.3, 0.4], [0.5, 0.1, -0.2]])  # log-odds to continue
SAMPLER = POLICY + np.array([[0.3, -0.4, 0.2], [-0.3, 0.35, -0.25]])  # an engine might sample from these instead


def log_probs(logits: np.ndarray) -> list[list[np.ndarray]]:
    """Return the log-prob of each token by prompt and response, from the log-odds [prompts, places]."""
    return [
        [
            np.array([-np.logaddexp(0.0, -z if go else z) for go, z in zip(r, of_prompt, strict=False)])
            for r in RESPONSES
        ]
        for of_prompt in logits
    ]


def scores(logits: np.ndarray) -> list[list[np.ndarray]]:
    """Return the derivative of each token's log-prob by the log-odds of its place, by prompt and response."""
    return [
        [np.array([go - 1 / (1 + np.exp(-z)) for go, z in zip(r, of_prompt, strict=False)]) for r in RESPONSES]
        for of_prompt in logits
    ]


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the probability of each response, [prompts, responses]."""
    return np.array([[np.exp(p.sum()) for p in of_prompt] for of_prompt in log_probs(logits)])


def gradient_of_mean(logits: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Return the exact gradient of each prompt's mean reward by its own log-odds, [prompts, places]."""
    gradient = np.zeros((PROMPTS, PLACES))
    for x, k in product(range(PROMPTS), range(len(RESPONSES))):
        gradient[x, : len(RESPONSES[k])] += probabilities(logits)[x, k] * rewards[x, k] * scores(logits)[x][k]
    return gradient


def greedy(logits: np.ndarray, prompt: int) -> int:
    """Return the response that takes the likelier token at every place."""
    path: list[int] = []
    while tuple(path) not in RESPONSES:
        path.append(int(logits[prompt, len(path)] > 0))
    return RESPONSES.index(tuple(path))


def values(logits: np.ndarray, rewards: np.ndarray) -> list[list[np.ndarray]]:
    """Return the prediction of an exact critic before each token, by prompt and response."""
    predictions = []
    for x in range(PROMPTS):
        p = probabilities(logits)[x]
        of_place = [float((p * rewards[x])[t:].sum() / p[t:].sum()) for t in range(PLACES)]  # responses that reach t
        predictions.append([np.array(of_place[: len(r)]) for r in RESPONSES])
    return predictions


Draw = tuple[tuple[int, ...], ...]  # the responses of each prompt's group


@dataclass(frozen=True)
class Steps:
    """Every step that can be drawn. Samples are flat, step after step, prompt after prompt; so are their tokens."""

    draws: tuple[Draw, ...]

    @staticmethod
    def all() -> Steps:
        """List the pairs of multisets."""
        groups = list(combinations_with_replacement(range(len(RESPONSES)), GROUP))
        return Steps(tuple(product(groups, repeat=PROMPTS)))

    @staticmethod
    def drawn(rng: np.random.Generator, sampler: np.ndarray, count: int) -> Steps:
        """Draw steps at random."""
        p = probabilities(sampler)
        columns = [rng.choice(len(RESPONSES), (count, GROUP), p=p[x] / p[x].sum()) for x in range(PROMPTS)]
        return Steps(
            tuple(tuple(tuple(int(k) for k in group) for group in step) for step in zip(*columns, strict=True))
        )

    def samples(self) -> Iterator[tuple[int, int, int]]:
        """Yield step, prompt and response of each sample."""
        for number, draw in enumerate(self.draws):
            for prompt, group in enumerate(draw):
                for response in group:
                    yield number, prompt, response

    @cached_property
    def lengths(self) -> list[int]:
        """The tokens of each sample."""
        return [len(RESPONSES[k]) for _, _, k in self.samples()]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Step, prompt, response and place of each token, [4, tokens]."""
        return np.array([(s, x, k, t) for s, x, k in self.samples() for t in range(len(RESPONSES[k]))]).T

    def column(self, table: list[list[np.ndarray]]) -> np.ndarray:
        """Return a number per token from a table by prompt and response, [tokens]."""
        padded = np.array([[np.pad(row, (0, PLACES - len(row))) for row in of_prompt] for of_prompt in table])
        return padded[tuple(self.tokens[1:])]

    @cached_property
    def cells(self) -> np.ndarray:
        """The entry of a [steps, prompts, places] array that each token's score belongs to, [tokens]."""
        step, prompt, _, place = self.tokens
        return (step * PROMPTS + prompt) * PLACES + place

    def probabilities(self, sampler: np.ndarray) -> np.ndarray:
        """Return the probability that each step is drawn, [steps]: multinomial, as a group has no order."""
        p = probabilities(sampler)

        def of_group(x: int, group: tuple[int, ...]) -> float:
            orders = factorial(GROUP) / prod(factorial(group.count(k)) for k in set(group))
            return float(orders * prod(p[x, k] for k in group))

        return np.array([prod(of_group(x, group) for x, group in enumerate(draw)) for draw in self.draws])

    def gradients(self, weights: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return each step's gradient [steps, prompts, places] from d loss / d log p of every token, [tokens]."""
        flat = np.bincount(
            self.cells, weights * self.column(scores(logits)), minlength=len(self.draws) * PROMPTS * PLACES
        )
        return flat.reshape(len(self.draws), PROMPTS, PLACES)
