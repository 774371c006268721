"""The result of a translation: our flags, and what became of every setting."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from miles.base import strict_json
from miles.base.secrets import public
from miles.base.text import InputError, one_line
from miles.config.components import ENGINES
from miles.objective.aggregation import MODES, Aggregation, step_denominators
from miles.objective.estimators import ESTIMATORS
from miles.tasks.data.settings import HUB_NAME, HUGGING_FACE

# Describe another trainer's aggregation, and find our mode that computes it or comes nearest.

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
    denominators = step_denominators(
        mode,
        token_counts=[response.tokens for response in step.responses],
        trajectory_ids=range(len(step.responses)),
        group_indices=[response.prompt for response in step.responses],
        divisor=divisor,
    )
    parts = (r.total / denominator for r, denominator in zip(step.responses, denominators.sample_denoms, strict=True))
    return sum(parts) / denominators.num_trajectories


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
class ForeignObjective:
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
        divisor = self.divisor
        return lambda step: our_value(mode, step, 1 / len(step.responses) if divisor is None else divisor)

    def nearest(self) -> Aggregation:
        """Return our mode whose token weights are nearest in the uneven batch."""
        return min(MODES, key=lambda mode: distance(self.reduce, self.ours(mode), UNEVEN))


T = TypeVar("T")

LONGEST_TEXT = 120
# Flags that choose the loss of a step; conformance compares them.
LOSS_FLAGS = (
    *("--loss-aggregation", "--policy-loss", "--kl-loss-type", "--use-unbiased-kl", "--use-tis", "--use-rs"),
    *("--tis-level", "--tis-mode", "--use-rollout-logprobs", "--entropy-coef", "--top-entropy-quantile"),
)


@dataclass(frozen=True)
class Expression:
    """Hold a value that is computed when the file is run, and so is not known: a variable, a call, an interpolation."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Setting:
    """Hold one setting: its name with dots between the levels, its value and its line in the file."""

    key: str
    value: Any
    line: int | None

    @property
    def label(self) -> str:
        """The setting as the report shows it, without credentials."""
        return f"{self.key} = {one_line(str(public(self.key, self.value)), LONGEST_TEXT)}"


@dataclass(frozen=True)
class Document:
    """Hold what was read from a file.

    Attributes:
        path: The file, as it was given.
        kind: ``json``, ``yaml``, ``toml``, ``python`` or ``shell``.
        settings: The settings in the order of the file. The last one of a name counts.
        words: The command of a shell script, without its variables; empty for other files.
        elsewhere: The words of the command that expand to flags set elsewhere, each with a sentence about it.
    """

    path: str
    kind: str
    settings: dict[str, Setting] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    elsewhere: dict[str, Setting] = field(default_factory=dict)

    def fail(self, line: int | None, fault: str) -> NoReturn:
        """Raise ``InputError`` with file and line."""
        fail(self.path, line, fault)


def fail(path: str, line: int | None, fault: str) -> NoReturn:
    """Raise ``InputError``: one sentence that starts with the file and the line."""
    place = path if line is None else f"{path}, line {line}"
    raise InputError(f"{one_line(place, 300)}: {one_line(fault, 600)}")


def by_key(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the settings by name. The last one of a name counts, and keeps the position of the first."""
    return {setting.key: setting for setting in settings}


def flatten(value: Any, line: dict[str, int], prefix: str = "") -> list[Setting]:
    """Return the leaves of nested objects, with dots between the levels. Lists are leaves."""
    settings: list[Setting] = []
    for name, part in value.items():
        key = f"{prefix}{name}"
        if isinstance(part, dict) and part:
            settings += flatten(part, line, f"{key}.")
        else:
            settings.append(Setting(key, part, line.get(key)))
    return settings


def parts_of(setting: Setting) -> list[Setting]:
    """Return the settings within an object, which may be written as JSON in a text; another setting alone."""
    value = setting.value
    if isinstance(value, str) and value.startswith("{"):
        with suppress(strict_json.StrictJsonError):
            value = strict_json.loads(value)
    if not isinstance(value, dict) or not value:
        return [setting]
    return [replace(each, line=setting.line) for each in flatten(value, {}, f"{setting.key}.")]


@dataclass(frozen=True)
class KnownSetting:
    """Describe a setting of another trainer.

    Attributes:
        default: The value there if no file states it; ``None`` if there is none, or it follows another setting.
        learning: Whether it changes what is learned, or how that is measured. Others are counted, not listed.
        flag: Our flag for the same value, two for a pair; empty if there is none, or the code of the trainer decides.
        why: What differs in meaning or, without a flag, what there is instead.
        kind: ``value``, ``number``, ``count`` for a whole number of 1 or more, ``pair`` for two numbers with a flag
            each, ``list``, ``file``, whose default is an example, ``prompts`` for a file or a name of the Hub, or
            ``switch``, which becomes a flag without value if it is true.
        neutral: Further values that ask for nothing, here and there. The default of a row without a flag is one.
        needs: A flag of miles without which this one has no effect: it is written only alongside it.
        other: Whether it belongs to other releases than the one whose defaults the table has.
        now: Its name in the trainer's newer release, whose row has the rest.
        null: The value that null stands for, if that is not the default.
    """

    default: Any = None
    learning: bool = False
    flag: str = ""
    why: str = ""
    kind: str = "value"
    neutral: tuple[Any, ...] = ()
    needs: str = ""
    other: bool = False
    now: str = ""
    null: Any = None


UNKNOWN = KnownSetting(learning=True)


@dataclass(frozen=True)
class Table:
    """Hold the settings of one trainer at one version.

    Attributes:
        version: The release or commit whose settings and defaults these are.
        source: Where its loss was read.
        quiet: Patterns of further names that do not change learning.
        rows: The settings by name.
        names: Names that it registers, by their kind, and our words for them.
        switches: Names that switch off the settings alongside them, if a file states false.
        proven: Our flags of the losses whose gradients are equal (docs/conformance.md).
    """

    version: str
    source: str
    quiet: tuple[str, ...]
    rows: Mapping[str, KnownSetting]
    names: Mapping[str, Any] = field(default_factory=dict)
    proven: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()

    def row(self, key: str) -> KnownSetting:
        """Return the row of ``key``. A name that the table lacks may change learning."""
        if key in self.rows:
            return self.rows[key]
        return KnownSetting() if any(fnmatchcase(key, pattern) for pattern in self.quiet) else UNKNOWN


@cache
def table_of(name: str) -> Table:
    """Read ``launchers/NAME.toml``."""
    table = tomllib.loads(Path(__file__).with_name("launchers").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    rows = {
        key: KnownSetting(**{**row, "neutral": tuple(row.get("neutral", ()))}) for key, row in table["settings"].items()
    }
    return Table(
        table["version"],
        table["source"],
        tuple(table["quiet"]),
        rows,
        table.get("names", {}),
        tuple(table.get("proven", ())),
        tuple(table.get("switches", ())),
    )


_SEES = re.compile(r"vlm|(^|[\d\W_])vl([\W_]|$)|vision|llava", re.IGNORECASE)  # the name of a model that reads images
_FILES_OF_PROMPTS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")


@dataclass(frozen=True)
class Entry:
    """Hold one line of the report: a setting, the flags that it became, and notes for the reader.

    Attributes:
        label: The setting.
        line: Its line in the file.
        words: The flags that it became.
        why: What differs; empty if nothing does.
        learning: Whether it changes what is learned.
        worst: The order in the report: the objective is 0, a feature that is left out 1, other differences 2.
    """

    label: str
    line: int | None
    words: tuple[str, ...] = ()
    why: str = ""
    learning: bool = True
    worst: int = 2


class Unknown(Exception):
    """A value that is computed when the file is run was asked for."""


class Translation:
    """Collect what becomes of the settings of one file.

    A launcher takes settings by name, checked for their type; one that the file leaves out has the trainer's default.
    The rest is translated by the rows of its table, or listed.
    """

    def __init__(self, document: Document, table: Table) -> None:
        self.document = document
        self.table = table
        self.entries: list[Entry] = []
        self._read: set[str] = set()  # a part of what was written
        self._taken: set[str] = set()  # written, or without effect

    # Reading ---------------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether the file sets ``key`` to something but null."""
        setting = self.document.settings.get(key)
        return setting is not None and setting.value is not None

    def is_null(self, key: str) -> bool:
        """Return whether the file sets ``key`` to null."""
        return key in self.document.settings and not self.has(key)

    def first(self, *keys: str) -> str:
        """Return the first of the names that the file sets, or else the first."""
        return next(filter(self.has, keys), keys[0])

    def raw(self, key: str, default: Any = None) -> Any:
        """Take the value of ``key``. If it is absent or null, return the trainer's default, or else ``default``.

        Raises:
            Unknown: The value is computed when the file is run.
        """
        self._read.add(key)
        if self.has(key):
            value = self.document.settings[key].value
            if isinstance(value, Expression):
                raise Unknown
            return value
        row = self.table.row(key)
        value = row.default if row.null is None or key not in self.document.settings else row.null
        return default if value is None else value

    def text(self, key: str, default: str = "") -> str:
        """Take a text."""
        return str(self.raw(key, default))

    def switch(self, key: str, default: bool = False) -> bool:
        """Take a truth value."""
        value = self.raw(key, default)
        word = str(value).lower()
        if word not in ("true", "false", "1", "0"):
            self.fail(key, "must be true or false; correct the value")
        return word in ("true", "1")

    def number(self, key: str, default: float = 0) -> float:
        """Take a finite number."""
        value = self.raw(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            self.fail(key, "must be a number; correct the value")
        if isinstance(value, bool) or not math.isfinite(number):
            self.fail(key, "must be a finite number; correct the value")
        return number

    def count(self, key: str, default: int = 1) -> int:
        """Take a whole number of 1 or more."""
        number = self.number(key, default)
        if number != int(number) or number < 1:
            self.fail(key, "must be a whole number of 1 or more; correct the value")
        return int(number)

    def pair(self, key: str) -> list[Any] | None:
        """Take a list of two numbers, or ``None``."""
        value = self.raw(key)
        if value is not None and (not isinstance(value, list) or len(value) != 2):
            self.fail(key, "must be a list of two numbers; correct it")
        return value

    def fail(self, key: str, rule: str) -> NoReturn:
        """Raise ``InputError`` about the value of ``key``."""
        setting = self.document.settings.get(key, Setting(key, self.table.row(key).default, None))
        self.document.fail(setting.line, f"{setting.label}: {rule}")

    # Writing ---------------------------------------------------------------------------------------------------------

    def attempt(self, part: Callable[[Translation], T]) -> T | None:
        """Translate a part. Nothing of it is written if it reads an unknown value: that setting is listed instead."""
        before = [*self.entries], {*self._taken}, {*self._read}
        try:
            return part(self)
        except Unknown:
            self.entries, self._taken, self._read = before
            return None

    def carry(self, key: str, *words: object, why: str = "", worst: int = 2) -> None:
        """Record that ``key`` became ``words``, or none, and in ``why`` what differs; not with an expression."""
        if not self._is_computed(key):
            self.entries.append(self._entry(key, words, why, worst))

    def miss(self, key: str, why: str, learning: bool = True) -> None:
        """Record that ``key`` is left out."""
        self.entries.append(self._entry(key, (), why, 1, learning))

    def idle(self, keys: Iterable[str], why: str) -> None:
        """Record that the keys among ``keys`` that the file sets have no effect there."""
        for key in filter(self.has, keys):
            self.miss(key, why, learning=False)

    def take(self, keys: Iterable[str]) -> None:
        """Mark settings as dealt with."""
        self._taken.update(keys)

    def takes(self, key: str) -> bool:
        """Return whether ``key`` is written already, or without effect."""
        return key in self._taken

    def _is_computed(self, key: str) -> bool:
        setting = self.document.settings.get(key)
        if setting is not None and isinstance(setting.value, Expression):
            return True
        self._taken.add(key)
        return False

    def _entry(self, key: str, words: tuple[object, ...], why: str, worst: int = 2, learning: bool = True) -> Entry:
        self._taken.add(key)
        setting = self.document.settings.get(key)
        learning = learning and self.table.row(key).learning
        text = setting.label if setting is not None else self._default_text(key)
        line = None if setting is None else setting.line
        return Entry(text, line, tuple(map(_word, words)), why, learning, worst)

    def _default_text(self, key: str) -> str:
        default = self.table.row(key).default
        text = f" = {one_line(str(default), LONGEST_TEXT)} (default of {self.table.version})"
        return key if default is None else key + text

    # The result ------------------------------------------------------------------------------------------------------

    @property
    def unread(self) -> list[Setting]:
        """The settings that were not read, that differ from the default, and that may change learning."""
        settings = []
        for key, setting in self.document.settings.items():
            row = self.table.row(key)
            plain = (row.default, *row.neutral, None)
            is_empty = setting.value == {} and any(name.startswith(f"{key}.") for name in self.table.rows)
            if (
                key not in self._taken | self._read
                and row.learning
                and not is_empty
                and not any(same(setting.value, value) for value in plain)
            ):
                settings.append(setting)
        return settings

    @property
    def differences(self) -> list[Entry]:
        """What differs from the original, the worst first."""
        return sorted((entry for entry in self.entries if entry.why and entry.learning), key=lambda entry: entry.worst)

    @property
    def quiet(self) -> int:
        """The number of settings of the file that are in no part of the report."""
        listed = {entry.label for entry in self.entries if (entry.learning if entry.why else entry.words)}
        listed |= {setting.label for setting in self.unread}
        return sum(setting.label not in listed for setting in self.document.settings.values())

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Our flags, first those that mean the same, each with its values; of a flag that is given again, the last."""
        groups = dict[str, tuple[str, ...]]()
        for entry in sorted(self.entries, key=lambda entry: bool(entry.why)):
            for group in _flag_groups(entry.words):
                groups[group[0]] = group
        return list(groups.values())

    @property
    def loss(self) -> str:
        """Our flags that choose the loss of a step, in alphabetical order."""
        return " ".join(sorted(" ".join(group) for group in self.groups if group[0] in LOSS_FLAGS))

    @property
    def is_proven(self) -> bool:
        """Whether ``miles conformance`` has found the gradient of this loss equal, and nothing else may change it."""
        others = [entry for entry in self.entries if entry.why and (entry.worst == 0 or {*entry.words} & {*LOSS_FLAGS})]
        return not (others or self.unread) and self.loss in self.table.proven

    @property
    def words(self) -> list[str]:
        """Our flags as the words of a command line."""
        return [word for group in self.groups for word in group]


def same(value: Any, other: Any) -> bool:
    """Return whether two values are equal, also if one is written as text or as another number."""
    if isinstance(value, Expression):
        return False
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, str) != isinstance(other, str):
        with suppress(TypeError, ValueError):  # a list, or no number
            if not isinstance(value, bool) and not isinstance(other, bool) and float(value) == float(other):
                return True
        return str(value).lower() == str(other).lower()
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _flag_groups(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append((word,))
        else:
            groups[-1] += (word,)
    return groups


def _word(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return one_line(str(value), 4000)


def apply(translation: Translation) -> None:
    """Translate the settings that are not read yet and whose row has a flag or a sentence.

    A default that changes learning is written like a value of the file.
    """
    rows = translation.table.rows
    for name in filter(translation.has, translation.table.switches):
        if same(translation.document.settings[name].value, False):
            start = name.rpartition(".")[0] + "."
            translation.take(key for key in translation.document.settings if key.startswith(start))
    for key in sorted((key for key in rows if not translation.takes(key)), key=lambda key: bool(rows[key].needs)):
        row = rows[key]
        is_set = translation.has(key) or (row.null is not None and key in translation.document.settings)
        writes_default = row.learning and row.flag and row.default is not None and row.kind not in ("file", "prompts")
        if (row.flag or row.why) and (is_set or writes_default):
            translation.attempt(lambda translation, key=key, row=row: _apply(translation, key, row))  # type: ignore[misc]


def _apply(translation: Translation, key: str, row: KnownSetting) -> None:
    if translation.is_null(key) and row.null is None and row.default is not None:
        translation.miss(key, f"null, and not its default {one_line(str(row.default), 80)}: choose {row.flag}")
        return
    value = translation.raw(key)
    plain = row.neutral if row.flag else (*row.neutral, row.default)
    if any(same(value, each) for each in plain):
        translation.carry(key)
    elif row.needs and row.needs not in translation.words:
        if translation.has(key) and not same(value, row.default):
            translation.miss(key, f"{row.flag} needs {row.needs}: add both")
    elif row.kind == "prompts":
        _write_prompts(translation, key, row)
    elif row.kind == "switch" and not translation.switch(key):
        translation.carry(key)
    elif row.kind == "number":
        _write(translation, key, row, translation.number(key))
    elif row.kind == "count":
        _write(translation, key, row, translation.count(key))
    elif row.kind == "pair":
        words = zip(row.flag.split(), translation.pair(key) or (), strict=False)
        translation.carry(key, *itertools.chain.from_iterable(words))
    else:
        _write(translation, key, row, [] if row.kind == "switch" else value)


def _write_prompts(translation: Translation, key: str, row: KnownSetting) -> None:
    name = prompts_of(translation, key)
    _write(translation, key, row if name.startswith(HUGGING_FACE) else KnownSetting(flag=row.flag), name)


def write_sets(translation: Translation, key: str, sources: Sequence[str], weights: Sequence[object] = ()) -> None:
    """Record the training prompts: one source, or a mix of several."""
    if len(sources) > 1:
        more = ["--prompt-mix-weights", *weights] if weights else []
        translation.carry(key, "--prompt-mix", *named_sets("set", sources), *more)
    else:
        translation.carry(key, "--prompt-data", *sources)


def named_sets(name: str, sources: Sequence[str]) -> list[str]:
    """Return sources, each after the name of its set; the names of several end in their number."""
    names = [name] if len(sources) == 1 else [f"{name}{number}" for number in range(len(sources))]
    return [word for pair in zip(names, sources, strict=True) for word in pair]


def prompts_of(translation: Translation, key: str, name: str = "") -> str:
    """Take a file of prompts, or a name of the Hub, as it is given here: ``name``, or else the value of ``key``."""
    name = name or translation.text(key)
    sibling = Path(translation.document.path).parent / name
    is_file = Path(name).suffix in _FILES_OF_PROMPTS or os.path.exists(name) or os.path.exists(sibling)
    return f"{HUGGING_FACE}{name}" if HUB_NAME.fullmatch(name) and not is_file else name


def write_images(translation: Translation, key: str, column: str, model: str, why: str = "") -> None:
    """Record the column of images, if ``key`` is stated or the name of the model tells that it reads them."""
    named = translation.document.settings.get(model)
    if translation.has(key) or (named is not None and _SEES.search(str(named.value))):
        translation.carry(key, "--multimodal-keys", json.dumps({"image": column}), why=why)


def _write(translation: Translation, key: str, row: KnownSetting, value: Any) -> None:
    if not row.flag:
        translation.miss(key, row.why)
        return
    translation.carry(key, row.flag, *(value if isinstance(value, list) else [value]), why=row.why)


def write_template(translation: Translation, key: str) -> None:
    """Record the arguments of the chat template, which are the settings within ``key``."""
    names = [name for name in translation.document.settings if name.startswith(f"{key}.")]
    if names:
        values = {name[len(key) + 1 :]: translation.raw(name) for name in names}
        translation.carry(names[0], "--apply-chat-template-kwargs", json.dumps(values))
        translation.take([key, *names])


def write_critic(translation: Translation, policy: str, critic: str, names: Iterable[str]) -> None:
    """Record the settings of the critic's optimizer that differ from the policy's: here it has the policy's values."""
    for name in names:
        if critic + name in translation.table.rows:
            value = translation.raw(critic + name)
            if not same(value, translation.raw(policy + name)):
                translation.carry(critic + name, why="the critic has the policy's value here")


def write_no_warmup(translation: Translation, keys: Sequence[str]) -> None:
    """Record that Hugging Face's schedule ``constant`` ignores its warm-up, which ``keys`` state."""
    for key in keys:
        if translation.has(key) and translation.number(key):
            translation.carry(key, why="has no effect there: constant_with_warmup is the schedule with a warm-up")
    translation.take(keys)


def write_warmup(translation: Translation, key: str, steps: float, each: int) -> None:
    """Record a warm-up that counts iterations of ``each`` optimizer steps there, as verl's and NeMo-RL's do."""
    why = f"counts iterations of {each} optimizer steps there; the learning rate rises at each step here"
    translation.carry(key, "--lr-warmup-iters", int(steps) * each, why=why if each > 1 else "")


def write_steps(translation: Translation, steps: str, epochs: str) -> None:
    """Record a number of iterations: a run ends there after a number of passes over the prompts too."""
    why = f"ends after this number of passes over the prompts there, if that comes first: {translation.count(epochs)}"
    translation.carry(steps, "--num-rollout", translation.count(steps), why=why)
    translation.take([epochs])


def write_support(translation: Translation) -> None:
    """Record that log-probs are over the whole vocabulary there, if sampling keeps fewer tokens."""
    values = {flag: values[0] for flag, *values in translation.groups if values}
    top_p, top_k, min_p, temperature = (
        float(values.get(f"--rollout-{name}", default))
        for name, default in (("top-p", 1), ("top-k", -1), ("min-p", 0), ("temperature", 1))
    )
    if not temperature or (top_p == 1 and top_k < 1 and not min_p):
        return
    key = "log-probs of truncated sampling"
    engine = ENGINES.get(values.get("--rollout-engine", ""))
    at_temperature = engine is None or engine.applies_temperature or temperature == 1
    if "--use-rollout-logprobs" in translation.words or not at_temperature:
        why = "over the whole vocabulary there; over the tokens that sampling keeps here, as these flags need"
        translation.carry(key, why=why, worst=0)
    else:
        translation.carry(key, "--no-support-replay")


# Write an estimator with the flags that it needs here, and a KL that is subtracted from rewards.


WHITENED = "advantages are whitened over the whole rollout there, over the tokens of a step here"


def write_estimator(translation: Translation, key: str, *words: object) -> None:
    """Record the estimator of ``key``, and that whitened advantages are whitened over other tokens."""
    translation.carry(key, *words, why=WHITENED if "--normalize-advantages" in words else "")


REST = "its own and of those after it"  # the tokens whose KL is subtracted from the advantage of a token
OWN = "its own alone"


def write_kl_in_rewards(translation: Translation, key: str, coefficient: float, kind: str, there: str = REST) -> bool:
    """Record a KL that is subtracted from rewards there, in the loss if the estimator here does not read it.

    The gradient of a KL in rewards is the gradient of the KL itself. As a term of the loss k1 has none, k3 another one,
    and k2 that one (docs/objectives.md).

    Args:
        translation: The translation.
        key: The setting of its weight.
        coefficient: The weight.
        kind: The estimator of the KL.
        there: The tokens whose KL the advantage of a token has there.

    Returns:
        Whether it became flags: it does not if the loss has a KL already.
    """
    words = translation.words
    name = words[words.index("--advantage-estimator") + 1] if "--advantage-estimator" in words else "grpo"
    if "--use-kl-loss" in words:
        translation.miss(key, "subtracted from rewards there; the loss has a KL too, and the flags here are for one")
        return False
    elif "kl_coef" in ESTIMATORS[name].reads:
        here = REST if ESTIMATORS[name].reward_at_last_token else OWN
        differs = f"a token's advantage has the KL of these tokens there: {there}; and here: {here}"
        why = "" if there == here else differs
        translation.carry(key, "--kl-coef", coefficient, "--kl-loss-type", kind, why=why, worst=1)
    else:
        why = f"subtracted from rewards there, which {name} does not do here: a term of the loss with a KL's gradient"
        if "--disable-grpo-std-normalization" not in words and name.startswith("grpo"):
            why += "; it is divided by the std of the group with the rewards there"
        translation.carry(key, "--use-kl-loss", "--kl-loss-coef", coefficient, "--kl-loss-type", "k2", why=why, worst=1)
    return True
