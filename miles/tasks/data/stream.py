"""The endless order in which prompts are drawn, and a position in it to resume from."""

import hashlib
import json
import logging
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn, TypeAlias

from miles.base.text import InputError
from miles.tasks.data.checked_rows import PromptSet
from miles.tasks.data.settings import fault_of_weights
from miles.types.sample import Prompt, PromptGroup

FINGERPRINTED = 4096
_OF_MIXTURES = "--prompt-mix and --curriculum-path"
_logger = logging.getLogger(__name__)


class NoPromptsLeft(ValueError):
    """All prompts of a set are left out (``--max-prompt-pass-rate``), so too few groups are left to draw.

    Attributes:
        left: How many groups can still be drawn.
    """

    def __init__(self, message: str = "", left: int = 0) -> None:
        super().__init__(message)
        self.left = left


def note_of_no_prompts(done: int, num_iterations: int) -> str:
    """Return the note of a run that ends for this reason after ``done`` iterations."""
    return (
        f"note: every prompt has reached --max-prompt-pass-rate, so the run ends after {done} of {num_iterations} "
        "iterations; give harder prompts or a higher rate to continue"
    )


def check_order(state: Mapping[str, Any], order: Mapping[str, Any]) -> None:
    """Check that a position in a set was saved in a run of the same order.

    Args:
        state: The position.
        order: The values that determine the order of this run: some of ``num_prompts``, ``shuffle`` and ``seed``.

    Raises:
        ValueError: The order was another one.
    """
    flags = {"num_prompts": "--prompt-data", "shuffle": "--rollout-shuffle", "seed": "--rollout-seed"}
    for key, value in order.items():
        if state[key] != value:
            position = f"in the prompts is for {key} {state[key]}, this run has {key} {value}"
            raise other_position(flags[key], position, flags[key])


def other_position(flag: str, position: str, flags: str) -> ValueError:
    """Return the error of a checkpoint whose ``position`` in the prompts is none of this run's."""
    return ValueError(
        f"{flag}: the checkpoint's position {position}, so it cannot continue from there; give {flags} as in the run "
        "that was saved, or start a new run from its weights with --finetune"
    )


class TrainingStream(ABC):
    """Draws the prompts that a run trains on, and resumes from a saved position."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The pass over the prompts that the last drawn one belongs to."""

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each prompt set by name; empty for prompts that are not in named sets."""
        return {}

    def start(self, iteration: int) -> None:
        """Note that the prompts of ``iteration`` are drawn from now on. Does nothing by default."""
        return None

    def record(self, iteration: int, groups: Iterable[PromptGroup]) -> None:
        """Note the groups that were scored for ``iteration``. Does nothing by default."""
        return None

    def leave_out(self, group_index: int) -> None:
        """Do not draw the prompt of that group again, if the prompts are known."""
        raise NotImplementedError

    @abstractmethod
    def draw(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` prompts as groups without samples."""

    @abstractmethod
    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """Return a position to resume from, at which the groups with the indices ``unfinished`` are drawn again."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""


class PromptStream(TrainingStream):
    """Draws the prompts of a set, pass after pass; each pass in its own order with ``shuffle``.

    The order of a pass is a pure function of the number of prompts, ``seed`` and the pass, so a position is three
    numbers, and a group can be drawn again from its index. Every prompt is drawn once a pass, unless ``leave_out`` has
    named it; then its index is not used.

    >>> stream = PromptStream([Prompt("a", (1,)), Prompt("b", (2,))], shuffle=False, seed=0)
    >>> [(g.group_index, g.prompt.text) for g in stream.draw(3)], stream.epoch
    ([(0, 'a'), (1, 'b'), (2, 'a')], 1)
    """

    def __init__(self, prompts: Sequence[Prompt], shuffle: bool, seed: int) -> None:
        """Start at the first prompt; raise ``ValueError`` if there are none."""
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._unfinished: list[int] = []  # group indices to draw again, before new ones
        self._mastered: set[int] = set()  # positions in ``prompts`` that are not drawn in new draws
        self._move_to(epoch=0, position=0, next_group_index=0)

    @property
    def epoch(self) -> int:
        """The pass that the last drawn prompt belongs to, counted from 0."""
        return self._epoch

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt is left to draw."""
        return len(self._mastered) < len(self._prompts)

    def leave_out(self, group_index: int) -> None:
        """Do not draw the prompt of that group again, in this pass or a later one."""
        epoch, position = divmod(group_index, len(self._prompts))
        self.leave_out_prompt(self._order_of(epoch)[position])

    def leave_out_prompt(self, position: int) -> None:
        """Do not draw the prompt at ``position`` of the set again."""
        self._mastered.add(position)

    def draw(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` prompts as groups without samples; ``group_index`` counts all draws of the run.

        Raises:
            NoPromptsLeft: All prompts are left out, and fewer than ``n`` groups are to be drawn again. None is drawn.
        """
        if len(self._unfinished) < n and not self.has_prompts:
            raise NoPromptsLeft(
                f"--max-prompt-pass-rate: all {len(self._prompts)} prompts have reached it; give harder prompts, or a "
                "higher rate",
                left=len(self._unfinished),
            )
        again = [self._group(index) for index in self._unfinished[:n]]
        del self._unfinished[:n]
        return again + [self._draw_one() for _ in range(n - len(again))]

    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """Return the position, in plain values that JSON can hold.

        Args:
            unfinished: Indices of groups that were drawn and are neither trained on nor dropped yet. A stream restored
                from this state draws them again first, so that no prompt is lost.
        """
        return {
            **self._order_key(),
            "epoch": self._epoch,
            "position": self._position,
            "next_group_index": self._next_group_index,
            "unfinished": sorted({*self._unfinished, *unfinished}),
            "mastered": sorted(self._mastered),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``: the next draw is the one that would have followed when it was taken.

        Other prompts, as many as before, are a note: rows may have been corrected.

        Raises ``ValueError`` for a state of another order: another number of prompts, shuffling or seed, or of
        the user's own source.
        """
        if "sets" in state:
            position = "is one in the sets of --prompt-mix or --curriculum-path"
            raise other_position("--prompt-data", position, _OF_MIXTURES)
        if "source" in state:
            position = "is one in the rows of --data-source-path"
            raise other_position("--prompt-data", position, "--data-source-path")
        check_order(state, self._order_key())
        if state.get("fingerprint", self._fingerprint) != self._fingerprint:  # absent in earlier checkpoints
            name = self._prompts[0].prompt_set
            _logger.warning(
                "%s: the rows differ from the saved run's, though they are as many (%d); this run "
                "continues at the same place in them; if this was not meant, give the rows of that run, or start a new "
                "run from its weights with --finetune",
                f"the prompt set {name}" if name else "--prompt-data",
                len(self._prompts),
            )
        self._move_to(state["epoch"], state["position"], state["next_group_index"])
        self._unfinished = list(state.get("unfinished", ()))  # absent in earlier checkpoints, which have none
        self._mastered = set(state.get("mastered", ()))

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of up to ``FINGERPRINTED`` rows, spread evenly: it takes milliseconds, and misses an edit of few rows.

        It covers the content of the file, so that another chat template or tokenizer does not change it.
        """
        digest = hashlib.blake2b(digest_size=8)
        step = -(-len(self._prompts) // FINGERPRINTED)
        rows = self._prompts.unrendered(step) if isinstance(self._prompts, PromptSet) else self._prompts[::step]
        for prompt in rows:
            row = [prompt.text if prompt.input is None else prompt.input, prompt.label]
            digest.update(json.dumps(row, skipkeys=True, default=lambda other: type(other).__name__).encode())
        return digest.hexdigest()

    def _order_key(self) -> dict[str, Any]:
        return {"num_prompts": len(self._prompts), "shuffle": self._shuffle, "seed": self._seed}

    def _move_to(self, epoch: int, position: int, next_group_index: int) -> None:
        self._epoch = epoch
        self._position = position
        self._next_group_index = next_group_index
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        return _order_of_pass(len(self._prompts), self._shuffle, self._seed, epoch)

    def _group(self, group_index: int) -> PromptGroup:
        """Return the group of an earlier draw; draws are numbered without gaps from the start of the run."""
        epoch, position = divmod(group_index, len(self._prompts))
        return PromptGroup(group_index, self._prompts[self._order_of(epoch)[position]])

    def _draw_one(self) -> PromptGroup:
        position = self.draw_position()
        return PromptGroup(self._next_group_index - 1, self._prompts[position])

    def draw_position(self) -> int:
        """Draw a new prompt, and return its position in the set. One must be left."""
        while True:
            if self._position == len(self._order):
                self._move_to(self._epoch + 1, 0, self._next_group_index)
            if self._order[self._position] not in self._mastered:
                break
            self._position += 1
            self._next_group_index += 1
        position = self._order[self._position]
        self._position += 1
        self._next_group_index += 1
        return position


@lru_cache(maxsize=4)  # groups that are drawn again are from the last two passes
def _order_of_pass(num_prompts: int, shuffle: bool, seed: int, epoch: int) -> Sequence[int]:
    """Return the positions of the prompts in the order of a pass; it is shared."""
    if not shuffle:
        return range(num_prompts)
    order = array("I", range(num_prompts))  # a list takes nine times the memory
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


# A mixture of prompt sets: which set the next prompt comes from, and a position to resume from (``--prompt-mix``).
#
# Sets take turns by smooth weighted round-robin: with weights w that add up to 1, every draw adds w_i to the credit of
# each set, takes the set of the largest credit, and subtracts 1 from that credit. So nothing is random, and with fixed
# weights and S sets, no set is ever a whole prompt ahead of its share or S - 1 prompts behind it. Within a set,
# prompts are drawn as without a mixture: pass after pass, with ``--rollout-shuffle`` each in its own order.
#
# A curriculum can change the weights, or name the next prompts, before every iteration.


_REMEMBERED = 100_000  # groups whose positions are kept: many more than can be in progress


@dataclass(frozen=True)
class NamedSet:
    """A prompt set of the mixture. The prompts carry its name (``Prompt.prompt_set``)."""

    name: str
    prompts: Sequence[Prompt]


class Mixture(TrainingStream):
    """Draws the prompts of several sets.

    >>> a, b = (NamedSet(name, [Prompt(name, (1,), prompt_set=name)]) for name in "ab")
    >>> mixture = Mixture([a, b], [0.75, 0.25], shuffle=False, seed=0)
    >>> "".join(group.prompt.text for group in mixture.draw(8))
    'aabaaaba'
    """

    def __init__(self, sets: Sequence[NamedSet], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        """Start at the first prompt of every set."""
        assert len(sets) == len(weights) > 0
        self.sets = tuple(sets)
        self._streams = [PromptStream(each.prompts, shuffle, seed) for each in sets]
        self._initial_weights = list(weights)
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
        return dict(zip((each.name for each in self.sets), self._weights, strict=True))

    @property
    def num_prompts(self) -> int:
        """The prompts of all sets together."""
        return sum(len(each.prompts) for each in self.sets)

    def place_of(self, group_index: int) -> tuple[str, int] | None:
        """Return the set of a group that was drawn, and the position of its prompt in it; None for another group."""
        if group_index not in self._places:
            return None
        number, position = self._places[group_index]
        return self.sets[number].name, position

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Draw by other weights from now on. ``weights`` has a value for every set."""
        self._weights = [weights[each.name] for each in self.sets]

    def draw_next(self, prompts: Iterable[tuple[str, int]]) -> None:
        """Draw these prompts next, before others: the name of a set, and a position in it. The rest is forgotten."""
        numbers = {each.name: number for number, each in enumerate(self.sets)}
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
            "sets": {each.name: stream.state() for each, stream in zip(self.sets, self._streams, strict=True)},
            "weights": list(self._weights),
            "given_weights": list(self._initial_weights),
            "credits": list(self._credits),
            "unfinished": [[index, *self._places[index]] for index in waiting],
            "named": [list(place) for place in self._named],
            "next_group_index": self._next_group_index,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, with the weights of this run.

        Raises:
            ValueError: It is the state of other sets, of a single one, or of another order.
        """
        names = [each.name for each in self.sets]
        saved = list(state.get("sets", ()))
        if saved != names:
            before = f"in the sets {', '.join(saved)}" if saved else f"of a run without {_OF_MIXTURES}"
            position = f"is one {before}, and this run draws from {', '.join(names)}"
            raise other_position("--prompt-mix", position, _OF_MIXTURES)
        for name, stream in zip(names, self._streams, strict=True):
            stream.restore(state["sets"][name])
        self._credits = list(state["credits"])
        self._places = {index: (number, position) for index, number, position in state["unfinished"]}
        self._again = sorted(self._places)
        self._named = [(number, position) for number, position in state["named"]]
        self._next_group_index = state["next_group_index"]


# Your function that chooses the prompts: ``--curriculum-path module:function``, called before every iteration.
#
# Its argument has statistics of each prompt. It returns new weights of the sets, the next prompts, or None to change
# nothing::
#
#     def easy_first(curriculum: Curriculum) -> dict[str, float]:
#         share = min(1.0, curriculum.iteration / 100)
#         return {"easy": 1.0 - share, "hard": share}
#
#     def unsolved(curriculum: Curriculum) -> list[tuple[str, int]]:
#         return [place for place, known in curriculum.prompts.items() if known.reward < 0.5]
#
# It should keep no separate state: a resumed run has the statistics of its checkpoint, and calls it again for its first
# iteration. With ``--async-steps`` or ``--partial-rollout``, groups that are in progress are not in the statistics yet.


CURRICULUM_FLAG = "--curriculum-path"
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


class CurriculumStream(Mixture):
    """A mixture whose weights and next prompts the user's function chooses.

    Attributes:
        function: The function; ``path`` is its import path.
        num_iterations: The iterations of the run.
        known: Statistics of the prompts that were generated from.
    """

    def __init__(
        self,
        sets: Sequence[NamedSet],
        weights: Sequence[float],
        shuffle: bool,
        seed: int,
        *,
        function: CurriculumFunction,
        path: str,
        num_iterations: int,
    ) -> None:
        """Start as the mixture of ``sets``."""
        super().__init__(sets, weights, shuffle, seed)
        self.function = function
        self.path = path
        self.num_iterations = num_iterations
        self.known: dict[Place, PromptStatistics] = {}

    def start(self, iteration: int) -> None:
        """Ask the function what to draw for ``iteration``.

        Raises:
            InputError: It returns something else than weights, prompts or None.
        """
        self.draw_next(())  # forgets prompts that were named before and not drawn
        sets = {each.name: each.prompts for each in self.sets}
        reply = self.function(Curriculum(iteration, self.num_iterations, self.weights, sets, dict(self.known)))
        if reply is None:
            return
        if isinstance(reply, Mapping):
            self.weigh(self._read_weights(reply))
        elif isinstance(reply, Sequence) and not isinstance(reply, str):
            self.draw_next([self._read_place(place) for place in reply])
        else:
            self._refuse(f"returned {reply!r:.80}", "return weights by set, a list of (set, position), or None")

    def _read_weights(self, reply: Mapping[str, float]) -> dict[str, float]:
        names = [each.name for each in self.sets]
        if sorted(map(str, reply)) != sorted(names):
            self._refuse(f"returned weights of {', '.join(map(str, reply))}", f"return one of each: {', '.join(names)}")
        weights = {name: float(reply[name]) for name in names}
        fault = fault_of_weights(list(weights.values()))
        if fault is not None:
            self._refuse(f"returned the weights {dict(reply)!r:.80}, which {fault}", "correct them")
        return weights

    def _read_place(self, place: Any) -> Place:
        sizes = {each.name: len(each.prompts) for each in self.sets}
        match place:
            case (str(name), int(position)) if 0 <= position < sizes.get(name, 0):
                return name, position
        sets = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        self._refuse(f"returned {place!r:.80} as a prompt", f"return (set, position) from 0 on; {sets}")

    def _refuse(self, fault: str, what_to_do: str) -> NoReturn:
        raise InputError(f"{CURRICULUM_FLAG} {self.path}: {fault}; {what_to_do}")

    def record(self, iteration: int, groups: Iterable[PromptGroup]) -> None:
        """Note the groups that were scored for ``iteration``."""
        for group in groups:
            place = self.place_of(group.group_index)
            if place is None or not group.samples:  # one of the user's own, or without rewards
                continue
            before = self.known[place].groups if place in self.known else 0
            rewards = group.trajectory_rewards
            lengths = [len(sample.response_ids) for sample in group.samples]
            reward, length = sum(rewards) / len(rewards), sum(lengths) / len(lengths)
            self.known[place] = PromptStatistics(before + 1, reward, length, iteration)

    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """Return the position of the mixture, and the statistics of the prompts."""
        known = [[*place, k.groups, k.reward, k.response_length, k.iteration] for place, k in self.known.items()]
        return super().state(unfinished) | {"known": known}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, or from a mixture's; with its weights, unless others are given now than then."""
        super().restore(state)
        if state.get("given_weights", self._initial_weights) == self._initial_weights:  # absent in earlier checkpoints
            self._weights = list(state["weights"])
        self.known = {
            (name, position): PromptStatistics(*numbers) for name, position, *numbers in state.get("known", ())
        }
