"""Your function that chooses the prompts: ``--curriculum-path module:function``, called before every iteration.

Its argument has statistics of each prompt. It returns new weights of the sets, the next prompts, or None to change
nothing::

    def easy_first(curriculum: Curriculum) -> dict[str, float]:
        share = min(1.0, curriculum.iteration / 100)
        return {"easy": 1.0 - share, "hard": share}

    def unsolved(curriculum: Curriculum) -> list[tuple[str, int]]:
        return [place for place, known in curriculum.prompts.items() if known.reward < 0.5]

It should keep no separate state: a resumed run has the statistics of its checkpoint, and calls it again for its first
iteration. With ``--async-steps`` or ``--partial-rollout``, groups that are in progress are not in the statistics yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from miles.base.text import InputError
from miles.base.user_code import load_function
from miles.tasks.data.settings import fault_of_weights
from miles.tasks.data.stream import Mixture, TrainingStream
from miles.types.sample import Prompt, PromptGroup

FLAG = "--curriculum-path"
Place: TypeAlias = tuple[str, int]  # the name of a set, and the position of a prompt in it


@dataclass(frozen=True)
class PromptStatistics:
    """Statistics of a prompt whose groups were scored.

    Attributes:
        groups: How often it was generated from.
        reward: The mean reward of the last group.
        response_length: The mean response length of the last group, in tokens.
        iteration: The iteration of the last group.
    """

    groups: int
    reward: float
    response_length: float
    iteration: int


@dataclass(frozen=True)
class Curriculum:
    """The argument of the function.

    Attributes:
        iteration: The iteration whose prompts are drawn next, counted from 0.
        num_iterations: The iterations of the run.
        weights: The current weights of the sets, by name.
        sets: The prompts of each set, in the order of its source.
        prompts: Statistics of the prompts that were generated from, by set and position.
    """

    iteration: int
    num_iterations: int
    weights: Mapping[str, float]
    sets: Mapping[str, Sequence[Prompt]]
    prompts: Mapping[Place, PromptStatistics]


CurriculumFunction: TypeAlias = Callable[[Curriculum], "Mapping[str, float] | Sequence[Place] | None"]


def load_curriculum(path: str) -> CurriculumFunction:
    """Import the function at ``path``.

    Raises:
        InputError: It cannot be imported, or cannot be called with one argument.
    """
    function = load_function(path, FLAG)
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        signature = inspect.signature(function)
        raise InputError(
            f"{FLAG} {path}: its signature is {signature}, and it must take one Curriculum "
            "(miles.tasks.data.curriculum); give it this signature"
        ) from None
    return function


@dataclass
class CurriculumStream(TrainingStream):
    """A mixture whose weights and next prompts the user's function chooses; a ``PromptSource`` (rollout/collect.py)."""

    mixture: Mixture
    function: CurriculumFunction
    path: str
    num_iterations: int
    known: dict[Place, PromptStatistics] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The complete passes of the mixture."""
        return self.mixture.epoch

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the mixture's sets."""
        return self.mixture.weights

    def start(self, iteration: int) -> None:
        """Ask the function what to draw for ``iteration``.

        Raises:
            InputError: It returns something else than weights, prompts or None.
        """
        mixture = self.mixture
        mixture.draw_next(())  # forgets prompts that were named before and not drawn
        sets = {one.name: one.prompts for one in mixture.sets}
        found = self.function(Curriculum(iteration, self.num_iterations, mixture.weights, sets, dict(self.known)))
        if found is None:
            return
        if isinstance(found, Mapping):
            self.mixture.weigh(self._weights(found))
        elif isinstance(found, Sequence) and not isinstance(found, str):
            self.mixture.draw_next([self._place(place) for place in found])
        else:
            self._refuse(f"returned {found!r:.80}", "return weights by set, a list of (set, position), or None")

    def _weights(self, found: Mapping[str, float]) -> dict[str, float]:
        names = [one.name for one in self.mixture.sets]
        if sorted(map(str, found)) != sorted(names):
            self._refuse(f"returned weights of {', '.join(map(str, found))}", f"return one of each: {', '.join(names)}")
        weights = {name: float(found[name]) for name in names}
        fault = fault_of_weights(list(weights.values()))
        if fault is not None:
            self._refuse(f"returned the weights {dict(found)!r:.80}, which {fault}", "correct them")
        return weights

    def _place(self, place: Any) -> Place:
        sizes = {one.name: len(one.prompts) for one in self.mixture.sets}
        match place:
            case (str(name), int(position)) if 0 <= position < sizes.get(name, 0):
                return name, position
        sets = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        self._refuse(f"returned {place!r:.80} as a prompt", f"return (set, position) from 0 on; {sets}")
        raise AssertionError("unreachable")

    def _refuse(self, fault: str, what_to_do: str) -> None:
        raise InputError(f"{FLAG} {self.path}: {fault}; {what_to_do}")

    def record(self, iteration: int, groups: Iterable[PromptGroup]) -> None:
        """Note the groups that were scored for ``iteration``."""
        for group in groups:
            place = self.mixture.place_of(group.group_index)
            if place is None or not group.samples:  # one of the user's own, or without rewards
                continue
            before = self.known[place].groups if place in self.known else 0
            lengths = [len(sample.response_ids) for sample in group.samples]
            reward, length = (sum(column) / len(column) for column in (group.rewards, lengths))
            self.known[place] = PromptStatistics(before + 1, reward, length, iteration)

    def leave_out(self, group_index: int) -> None:
        """Leave the prompt of that group out of the mixture."""
        self.mixture.leave_out(group_index)

    def draw(self, n: int) -> list[PromptGroup]:
        """Draw from the mixture."""
        return self.mixture.draw(n)

    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """Return the position of the mixture, and the statistics of the prompts."""
        known = [[*place, k.groups, k.reward, k.response_length, k.iteration] for place, k in self.known.items()]
        return self.mixture.state(unfinished) | {"known": known}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, or from the state of the mixture alone."""
        self.mixture.restore(state)
        self.mixture.restore_weights(state)
        self.known = {
            (name, position): PromptStatistics(*numbers) for name, position, *numbers in state.get("known", ())
        }
