"""A mixture of prompt sets: which set the next prompt comes from, and a position to resume from (``--prompt-mix``).

Sets take turns by smooth weighted round-robin: with weights w that add up to 1, every draw adds w_i to the credit of
each set, takes the set of the largest credit, and subtracts 1 from that credit. So nothing is random, and with fixed
weights and S sets, no set is ever a whole prompt ahead of its share or S - 1 prompts behind it. Within a set, prompts
are drawn as without a mixture: pass after pass, with ``--rollout-shuffle`` each in its own order.

A curriculum (curriculum.py) can change the weights, or name the next prompts, before every iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.tasks.data.stream import NoPromptsLeft, PromptStream, TrainingStream
from miles.types.sample import Prompt, PromptGroup

_REMEMBERED = 100_000  # groups whose places are kept: many more than can be in progress


@dataclass(frozen=True)
class NamedSet:
    """A prompt set of the mixture. The prompts carry its name (``Prompt.prompt_set``)."""

    name: str
    prompts: Sequence[Prompt]


class Mixture(TrainingStream):
    """Draws the prompts of several sets; a ``PromptSource`` (rollout/collect.py).

    >>> a, b = (NamedSet(name, [Prompt(name, (1,), prompt_set=name)]) for name in "ab")
    >>> mixture = Mixture([a, b], [0.75, 0.25], shuffle=False, seed=0)
    >>> "".join(group.prompt.text for group in mixture.draw(8))
    'aabaaaba'
    """

    def __init__(self, sets: Sequence[NamedSet], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        """Start at the first prompt of every set."""
        assert len(sets) == len(weights) > 0
        self.sets = tuple(sets)
        self._order = {"shuffle": shuffle, "seed": seed}
        self._streams = [PromptStream(one.prompts, shuffle, seed) for one in sets]
        self._given_weights = list(weights)
        self._weights = list(weights)
        self._credits = [0.0] * len(sets)
        self._places: dict[int, tuple[int, int]] = {}  # the set and the prompt of each group that was drawn
        self._again: list[int] = []  # groups to draw again, before new ones
        self._named: list[tuple[int, int]] = []  # prompts that a curriculum has named, before others
        self._next_group_index = 0

    @property
    def epoch(self) -> int:
        """The passes that are complete over every set that is drawn from."""
        drawn = self._open() or range(len(self.sets))
        return min(self._streams[number].epoch for number in drawn)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each set, by its name."""
        return dict(zip((one.name for one in self.sets), self._weights, strict=True))

    @property
    def num_prompts(self) -> int:
        """The prompts of all sets together."""
        return sum(len(one.prompts) for one in self.sets)

    def place_of(self, group_index: int) -> tuple[str, int] | None:
        """Return the set of a group that was drawn, and the position of its prompt in it; None for another group."""
        if group_index not in self._places:
            return None
        number, position = self._places[group_index]
        return self.sets[number].name, position

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Draw by other weights from now on. The names are those of all sets."""
        self._weights = [weights[one.name] for one in self.sets]

    def draw_next(self, prompts: Iterable[tuple[str, int]]) -> None:
        """Draw these prompts next, before others: the name of a set, and a position in it. The rest is forgotten."""
        numbers = {one.name: number for number, one in enumerate(self.sets)}
        self._named = [(numbers[name], position) for name, position in prompts]

    def leave_out(self, group_index: int) -> None:
        """Do not draw the prompt of that group again, unless a curriculum names it."""
        number, position = self._places[group_index]
        self._streams[number].leave_out_prompt(position)

    def draw(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` prompts as groups without samples; ``group_index`` counts all draws of the run.

        Raises:
            NoPromptsLeft: All prompts are left out, and fewer than ``n`` groups are named or to be drawn again. None is
                drawn.
        """
        left = len(self._again) + len(self._named)
        if left < n and not self._open():
            raise NoPromptsLeft(
                f"--max-prompt-pass-rate: all {self.num_prompts} prompts of the sets that are drawn have reached it; "
                "give harder prompts, or a higher rate",
                left=left,
            )
        again = [self._group(index) for index in self._again[:n]]
        del self._again[: len(again)]
        return again + [self._draw_one() for _ in range(n - len(again))]

    def _draw_one(self) -> PromptGroup:
        number, position = self._named.pop(0) if self._named else self._next_place()
        index = self._next_group_index
        self._places[index] = number, position
        if len(self._places) > 2 * _REMEMBERED:
            self._places = dict(list(self._places.items())[_REMEMBERED:])
        self._next_group_index += 1
        return self._group(index)

    def _next_place(self) -> tuple[int, int]:
        open_sets = self._open()
        total = sum(self._weights[number] for number in open_sets)
        for number in open_sets:
            self._credits[number] += self._weights[number] / total
        number = max(open_sets, key=lambda n: (self._credits[n], -n))
        self._credits[number] -= 1.0
        return number, self._streams[number].draw_position()

    def _open(self) -> list[int]:
        """Return the sets that have a weight, and prompts to draw."""
        return [n for n, stream in enumerate(self._streams) if self._weights[n] > 0 and stream.has_prompts]

    def _group(self, group_index: int) -> PromptGroup:
        number, position = self._places[group_index]
        return PromptGroup(group_index, self.sets[number].prompts[position])

    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """Return the position, in plain values that JSON can hold; see ``PromptStream.state``."""
        waiting = sorted({*self._again, *unfinished})
        return {
            "sets": {one.name: stream.state() for one, stream in zip(self.sets, self._streams, strict=True)},
            "weights": list(self._weights),
            "given_weights": list(self._given_weights),
            "credits": list(self._credits),
            "unfinished": [[index, *self._places[index]] for index in waiting],
            "named": [list(place) for place in self._named],
            "next_group_index": self._next_group_index,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Weights are those that are given now: what ``weigh`` has changed is for its caller to restore
        (``restore_weights``).

        Raises:
            ValueError: It is the state of other sets, of a single one, or of another order.
        """
        names = [one.name for one in self.sets]
        found = list(state.get("sets", ()))
        if found != names:
            before = (
                f"in the sets {', '.join(found)}" if found else "of a run without --prompt-mix and --curriculum-path"
            )
            raise ValueError(
                f"--prompt-mix: the checkpoint's position is one {before}, and this run draws from "
                f"{', '.join(names)}, so it cannot continue from there; give --prompt-mix and --curriculum-path as in "
                "the run that was saved, or start a new run from its weights with --finetune"
            )
        for name, stream in zip(names, self._streams, strict=True):
            stream.restore(state["sets"][name])
        self._credits = list(state["credits"])
        self._places = {index: (number, position) for index, number, position in state["unfinished"]}
        self._again = sorted(self._places)
        self._named = [(number, position) for number, position in state["named"]]
        self._next_group_index = state["next_group_index"]

    def restore_weights(self, state: Mapping[str, Any]) -> None:
        """Continue with the weights of ``state``, unless other ones are given now than in the run that was saved."""
        if state.get("given_weights", self._given_weights) == self._given_weights:  # absent in earlier checkpoints
            self._weights = list(state["weights"])
