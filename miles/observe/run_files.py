"""The files of a run in its output folder: its metrics and sampled answers, its facts, and how it ended."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from miles.base.disk_faults import naming_disk
from miles.base.secrets import public
from miles.config import run_file

# Keep metrics.jsonl within a bound (``--metrics-max-mb``): old rows get sparse, and the newest stay whole.


FIRST = 20  # rows that are never dropped: health rules compare with the beginning of a run
TARGET = 0.75  # of the bound, after rows were dropped, so that this is done rarely

# A row is of the first kind whose metrics it has. Each kind is thinned apart: a row of rewards or of an evaluation may
# be one in many.
_KINDS = (b'"eval/', b'"rollout/', b"")


def thin(path: Path, most_bytes: int) -> None:
    """Drop rows until the file has at most ``TARGET`` of ``most_bytes``, if that is possible.

    Among the rows between the first and the newest quarter, every second of each kind is dropped, again and again. A
    long run that is thinned many times has the fewest rows from its early middle. The file is read in portions: it may
    be large.

    Raises:
        WriteFailed: The disk is full; the file is as it was.
    """
    lengths, kinds = _scan(path)
    remaining: Sequence[int] = range(len(lengths))
    while sum(lengths[i] for i in remaining) > TARGET * most_bytes:
        fewer = _halved(remaining, kinds)
        if len(fewer) == len(remaining):
            break
        remaining = fewer
    new = path.with_name(f"{path.name}.new")
    wanted = set(remaining)
    with naming_disk(path, new):
        with path.open("rb") as old, new.open("wb") as file:
            file.writelines(line for number, line in enumerate(old) if number in wanted)
        new.replace(path)


def _scan(path: Path) -> tuple[array[int], bytearray]:
    """Return the bytes and the kind of each row."""
    lengths, kinds = array("q"), bytearray()
    with path.open("rb") as file:
        for line in file:
            lengths.append(len(line))
            kinds.append(next(number for number, name in enumerate(_KINDS) if name in line))
    return lengths, kinds


def _halved(rows: Sequence[int], kinds: bytearray) -> list[int]:
    """Return ``rows`` without every second row of each kind in the middle."""
    newest = max(FIRST, len(rows) - len(rows) // 4)
    seen = [0] * len(_KINDS)
    remaining = [*rows[:FIRST]]
    for row in rows[FIRST:newest]:
        kind = kinds[row]
        if seen[kind] % 2 == 0:
            remaining.append(row)
        seen[kind] += 1
    return [*remaining, *rows[newest:]]


_ERRORS = "backslashreplace"  # a lone surrogate, which UTF-8 cannot hold, becomes its JSON escape


def finite(value: Any) -> Any:
    """Return ``value`` with null for NaN and infinity, which JSON does not have, at any depth."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dump_line(row: Mapping[str, Any], ascii_only: bool = False) -> str:
    r"""Return ``row`` as one line of strict JSON, if need be of ASCII. What JSON cannot hold is written as its ``str``.

    >>> dump_line({"reward": 0.5, "log_probs": [-1.0, float("nan")]})
    '{"reward": 0.5, "log_probs": [-1.0, null]}\n'
    """
    try:
        return json.dumps(dict(row), ensure_ascii=ascii_only, default=str, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(finite(row), ensure_ascii=ascii_only, default=str) + "\n"


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add ``rows`` at the end and flush, so that a killed run loses no finished step.

    Raises ``WriteFailed`` if the disk is full, or cannot be written for another reason.
    """
    with naming_disk(path), path.open("a", encoding="utf-8", errors=_ERRORS) as file:
        file.writelines(dump_line(row) for row in rows)


def read(path: Path, key: str) -> list[dict[str, Any]]:
    """Return all rows; none without a file. A last line without its newline is still being written and is left out.

    Raises ``ValueError`` naming file and line when another line is not a JSON object with a whole number as ``key``.
    """
    if not path.is_file():
        return []
    complete = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = [parse_line(line, path, number) for number, line in enumerate(complete, 1)]
    for number, row in enumerate(rows, 1):
        if type(row.get(key)) is not int:
            raise ValueError(f"{path}:{number}: has no whole number as {key!r}; remove the line or the file")
    return rows


def parse_line(line: str, path: Path, number: int | str) -> dict[str, Any]:
    """Parse one line. Raises ``ValueError`` naming the file and ``number`` when it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ValueError(f"{path}:{number}: not JSON ({error}); remove the line or the file") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: {line[:60]} is not a JSON object; remove the line or the file")
    return row


def drop_from(path: Path, key: str, limit: int) -> int | None:
    """Remove the rows whose ``row[key] >= limit`` and an unfinished last line; give the largest key that is left.

    None if no row is left.

    Raises:
        ValueError: A line is damaged; the message names it or its file.
        WriteFailed: As ``append`` does; the file is as it was then.
    """
    if not path.is_file():
        return None
    rows = read(path, key)
    remaining = [row for row in rows if row[key] < limit]
    replacement = path.with_name(path.name + ".new")  # renamed when complete: a kill here loses neither file
    with naming_disk(path, replacement):
        replacement.write_text("".join(map(dump_line, remaining)), encoding="utf-8", errors=_ERRORS)
        os.replace(replacement, path)
    return max((row[key] for row in remaining), default=None)


# samples.jsonl without reading it: any iteration by bisection, neighbours, and search in portions.
#
# The rows are in the order of their iterations, so that an iteration is found with a few reads at any size of the
# file. Each row names its iteration by ``rollout_id``, the last optimizer step of the iteration.


_STEP = re.compile(rb'\{"rollout_id": (\d+),')
_SEARCH_CHUNK = 1 << 23
_TAIL = 1 << 16

Row = dict[str, Any]


@dataclass(frozen=True)
class Iteration:
    """The stored rows of one iteration, named by ``step``, and the iterations around it (None: there is none)."""

    step: int
    rows: list[Row]
    first: int
    last: int
    previous: int | None
    next: int | None


@dataclass(frozen=True)
class Hit:
    """A row that a search found: its iteration, its position there, and the row."""

    step: int
    index: int
    row: Row


@dataclass(frozen=True)
class SearchPage:
    """Some hits. ``cursor`` continues the search; None: the end of the file is reached."""

    hits: list[Hit]
    cursor: int | None
    searched: float  # the share of the file that has been searched


class SampleFile:
    """Reads a file of samples that may grow. Every call opens it again, so the file may be replaced.

    Raises:
        ValueError: From every call that meets a line that is not a sample; the message names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def iteration(self, step: int | None) -> Iteration | None:
        """Return the iteration ``step``, else the next stored one, else the last (also for None); None if none is."""
        if not self.path.is_file():
            return None
        with self.path.open("rb") as file:
            end = _end(file)
            if not end:
                return None
            first, last = self._step_at(file, 0), self._step_at(file, _line_before(file, end))
            wanted = last if step is None else min(step, last)
            begin = self._offset(file, wanted, end)
            stored_step = self._step_at(file, begin)
            stop = self._offset(file, stored_step + 1, end)
            file.seek(begin)
            lines = file.read(stop - begin).split(b"\n")[:-1]
            previous = self._step_at(file, _line_before(file, begin)) if begin else None
            following = self._step_at(file, stop) if stop < end else None
        rows = [self._parsed(line, begin) for line in lines]
        return Iteration(stored_step, rows, first, last, previous, following)

    def cut(self, step: int) -> None:
        """Remove ``step`` and all later iterations, and an unfinished last line."""
        if not self.path.is_file():
            return
        with self.path.open("r+b") as file:
            file.truncate(self._offset(file, step, _end(file)))

    def search(self, text: str, cursor: int = 0, most: int = 50, seconds: float = 0.5) -> SearchPage:
        """Return rows whose prompt, response or label holds ``text`` in any case, from ``cursor`` on.

        It stops after ``most`` hits or after ``seconds``; at least one portion of the file is searched.
        """
        hits: list[Hit] = []
        until = time.monotonic() + seconds
        if not self.path.is_file():
            return SearchPage([], None, 1.0)
        # Bytes have cases in ASCII alone: rows that hold such a part of the text are read, and compared with all of it.
        parts = re.findall("[\\x00-\\x7f]+", json.dumps(text, ensure_ascii=False)[1:-1])
        needle = max(parts, key=len, default="").encode("ascii").lower()
        with self.path.open("rb") as file:
            end = _end(file)
            cursor = _line_after(file, cursor, end) if cursor else 0  # one of an older file may be inside a line
            while cursor < end and len(hits) < most:
                for line, offset in _lines_with(file, needle, cursor, end):
                    cursor = offset + len(line) + 1
                    row = self._parsed(line, offset)
                    if _holds(row, text.lower()):
                        hits.append(self._hit(file, row, offset, end))
                        if len(hits) >= most:
                            break
                    if time.monotonic() > until:
                        break
                else:
                    cursor = _line_after(file, cursor + _SEARCH_CHUNK, end)
                if time.monotonic() > until:
                    break
        return SearchPage(hits, None if cursor >= end else cursor, cursor / end if end else 1.0)

    def _hit(self, file: BinaryIO, row: Row, offset: int, end: int) -> Hit:
        begin = self._offset(file, row["rollout_id"], end)
        file.seek(begin)
        return Hit(row["rollout_id"], file.read(offset - begin).count(b"\n"), row)

    def _offset(self, file: BinaryIO, step: int, end: int) -> int:
        """Return the offset of the first line of iteration ``step`` or later; ``end`` if there is none."""
        low, high = 0, end  # lines that start before low are earlier ones; those from high on are not
        while low < high:
            middle = (low + high) // 2
            start = low if middle == low else _line_after(file, middle, end)
            if start >= high:
                high = middle
            elif self._step_at(file, start) < step:
                file.seek(start)
                file.readline()
                low = file.tell()
            else:
                high = start
        return low

    def _step_at(self, file: BinaryIO, offset: int) -> int:
        file.seek(offset)
        if match := _STEP.match(file.read(40)):
            return int(match[1])
        file.seek(offset)
        step = self._parsed(file.readline().rstrip(b"\n"), offset).get("rollout_id")
        if not isinstance(step, int):
            raise ValueError(f"{self.path}: the row at byte {offset} has no rollout_id; remove the line or the file")
        return step

    def _parsed(self, line: bytes, offset: int) -> Row:
        return parse_line(line.decode("utf-8", "replace"), self.path, f"byte {offset}")


def spread_order(count: int) -> list[int]:
    """Return 0 to ``count - 1`` in an order whose every beginning is spread evenly.

    >>> spread_order(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = max(count - 1, 0).bit_length()
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits))
    return [i for i in reversed_bits if i < count]


def _end(file: BinaryIO) -> int:
    """Return the end of the last complete line."""
    return _line_before(file, file.seek(0, 2) + 1)


def _line_before(file: BinaryIO, offset: int) -> int:
    """Return the start of the line that ends before ``offset``."""
    position = offset - 1
    while position:
        begin = max(0, position - _TAIL)
        file.seek(begin)
        newline = file.read(position - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        position = begin
    return 0


def _line_after(file: BinaryIO, position: int, end: int) -> int:
    """Return the start of the first line at or after ``position``; ``end`` if there is none."""
    if position >= end:
        return end
    file.seek(position - 1)
    file.readline()
    return min(file.tell(), end)


def _lines_with(file: BinaryIO, needle: bytes, cursor: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines that start in the portion at ``cursor`` and hold ``needle`` in any case, and their offsets."""
    file.seek(cursor)
    portion = file.read(min(_SEARCH_CHUNK, end - cursor))
    if not portion.endswith(b"\n"):
        portion += file.readline()
    lowered, position = portion.lower(), 0
    while position < len(lowered) and (match := lowered.find(needle, position)) >= 0:
        begin = portion.rfind(b"\n", 0, match) + 1
        stop = portion.index(b"\n", match)
        yield portion[begin:stop], cursor + begin
        position = stop + 1


def _holds(row: Row, text: str) -> bool:
    return any(text in str(row.get(name) or "").lower() for name in ("prompt", "response", "label"))


# The identity of a run: it tells the checkpoints and metrics of one run from those that another run wrote.


@dataclass(frozen=True)
class RunIdentity:
    """The id of a run and the local time at which it first started, as its checkpoints and run.json have it."""

    id: str
    started: str

    @classmethod
    def new(cls) -> RunIdentity:
        """Return the identity of a run that starts now."""
        return cls(uuid.uuid4().hex[:12], time.strftime("%Y-%m-%d %H:%M:%S"))

    @classmethod
    def from_state(cls, saved_in: dict[str, Any]) -> RunIdentity | None:
        """Return the identity in a checkpoint's launcher state or in run.json; None if their version had none."""
        saved = saved_in.get("run")
        if not isinstance(saved, dict) or saved.keys() != {"id", "started"}:
            return None
        return cls(str(saved["id"]), str(saved["started"]))

    def to_state(self) -> dict[str, str]:
        """Return plain JSON, to be saved as ``run``."""
        return asdict(self)

    def __str__(self) -> str:
        return f"run {self.id} of {self.started}"


# The facts of a run: title, settings, objective, and the software and data that it ran with. Saved as run.json
# alongside the metrics.


FILE_NAME = "run.json"


@dataclass(frozen=True)
class RunHeader:
    """The facts of a run that do not change while it runs.

    ``settings`` and ``defaults`` map section to field to value (a field without an entry in ``defaults`` counts as
    default, so that a header without defaults highlights nothing). ``objective_words`` and ``objective_formula``
    describe the objective. ``total_steps`` counts optimizer steps, the length of the progress bar. ``provenance`` lists
    the versions, data and machine that the run started with (provenance.py); empty in files of earlier versions.
    ``run`` is the ``RunIdentity``; empty in files of earlier versions, and in a run that continues a checkpoint of one.
    """

    title: str
    settings: dict[str, dict[str, Any]]
    objective_words: str
    objective_formula: str
    total_steps: int
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    run: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_sections(
        cls,
        title: str,
        sections: Any,
        objective_words: str,
        objective_formula: str,
        total_steps: int,
        provenance: dict[str, Any] | None = None,
    ) -> RunHeader:
        """Read settings and defaults from ``sections``, a dataclass whose fields are dataclasses (``Settings``).

        A field of name-value pairs (``megatron_overrides``) is a section where nothing has its default value.
        """
        settings: dict[str, dict[str, Any]] = {}
        defaults: dict[str, dict[str, Any]] = {}
        for section in dataclasses.fields(sections):
            values = getattr(sections, section.name)
            if isinstance(values, tuple):
                settings[section.name] = dict(values)
                defaults[section.name] = dict.fromkeys(settings[section.name])
                continue
            settings[section.name] = dataclasses.asdict(values)
            defaults[section.name] = {
                f.name: f.default for f in dataclasses.fields(values) if f.default is not dataclasses.MISSING
            }
        return cls(title, settings, objective_words, objective_formula, total_steps, defaults, provenance or {})

    def is_default(self, section: str, name: str) -> bool:
        """Return whether the setting has its default value, or has none to compare with."""
        known = self.defaults.get(section, {})
        return name not in known or self.settings[section][name] == known[name]

    def public_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings without secrets: only this form may leave the process."""
        sections: dict[str, dict[str, Any]] = public("settings", self.settings)
        return sections

    def save(self, output_dir: Path) -> None:
        """Write ``run.json``, without secrets. Raises ``WriteFailed`` if the disk is full."""
        header = dataclasses.replace(
            self, settings=self.public_settings(), provenance=public("provenance", self.provenance)
        )
        text = json.dumps(dataclasses.asdict(header), indent=1, ensure_ascii=False, default=str)
        path = output_dir / FILE_NAME
        with naming_disk(path):
            path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def _check(self) -> None:
        """Raise ``ValueError`` if a value is not of its kind, as in a file that was edited."""
        for name in ("settings", "defaults"):
            sections = getattr(self, name)
            if not isinstance(sections, dict) or not all(isinstance(fields, dict) for fields in sections.values()):
                raise ValueError(f"{name} are not sections of names and values")
        if not isinstance(self.title, str) or type(self.total_steps) is not int:
            raise ValueError("title or total_steps is not a text or a whole number")

    @classmethod
    def load(cls, output_dir: Path) -> RunHeader:
        """Read ``run.json`` back. Raises ``ValueError`` when the folder holds no run, or one of another version."""
        path = output_dir / FILE_NAME
        if not path.is_file():
            raise ValueError(f"{output_dir}: no {FILE_NAME} there; give the --output-dir of a run that has started")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for name in values if isinstance(values, dict) else ():
                if name not in cls.__dataclass_fields__:
                    raise ValueError(f"this version has no field {name!r}")
            header = cls(**values)
            header._check()
            return header
        except (TypeError, ValueError, RecursionError) as error:
            what_to_do = "read it with the version of miles that wrote it, or copy the run's folder again"
            fault = "it has other fields" if isinstance(error, TypeError) else error
            raise ValueError(f"{path}: cannot be read ({fault}); {what_to_do}") from error


# The files of a run in its output folder: metrics.jsonl and samples.jsonl, written step by step and read back.


METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"
REPORT = "report.html"
CONFIG = run_file.FILE_NAME
ENDED_EARLY = "ended-early.json"  # of a run that came to its end before the last of its steps
END = "end.json"  # how the run ended; none while it runs, and after a kill
_OF_RUN = (METRICS, SAMPLES, CONFIG, ENDED_EARLY, END, FILE_NAME)  # no command can write them again


@dataclass(frozen=True)
class SampleRecord:
    """One stored answer. ``status`` is the value of a ``SampleStatus``.

    Everything after it may be missing (None): files of earlier versions have no more, and tokens are left out where
    they would not fit. The lists have one entry per response token. ``mask`` and ``weight_versions`` are run-length
    pairs, ``[[value, count], ...]``; version -1 is a token of a tool or an environment.

    Attributes:
        reward_parts: The parts of a reward that is a weighted sum, by name.
        images: Thumbnails of the prompt's images, as data: URIs.
        group: The prompt draw, ``group_index``.
        trajectory: ``trajectory_id``.
        train_step: The optimizer step that trains on it.
        advantage: Phase 1 of the advantage, one number per sample; None if the estimator makes them per token.
        denominator: The sample's token losses are divided by it, and by ``trajectories``.
        trajectories: N, the number of trajectories of the optimizer step.
        tokens: The text of each token.
        mask: The loss mask.
        rollout_log_probs: The engine's log-probs.
        weight_versions: The version of the weights for each token.
        log_probs: The trainer's log-probs before the iteration's first step. They and the fields below are stored for
            few samples (``--samples-token-values``).
        ratios: Current policy over the one that the iteration began with; None: all are 1.
        token_weights: The product of the corrections of each token; None: all are 1.
        advantages: The advantage of each token; None: all are ``advantage``.
    """

    prompt: str
    response: str
    reward: float | None
    label: Any
    status: str
    reward_parts: dict[str, float] | None = None
    images: list[str] | None = None
    group: int | None = None
    trajectory: int | None = None
    train_step: int | None = None
    advantage: float | None = None
    denominator: float | None = None
    trajectories: int | None = None
    tokens: list[str] | None = None
    mask: list[list[int]] | None = None
    rollout_log_probs: list[float | None] | None = None
    weight_versions: list[list[int]] | None = None
    log_probs: list[float | None] | None = None
    ratios: list[float | None] | None = None
    token_weights: list[float | None] | None = None
    advantages: list[float | None] | None = None

    def row(self, step: int) -> dict[str, Any]:
        """Return the row of samples.jsonl; ``step`` is the last optimizer step of the iteration."""
        present = {name: value for name, value in vars(self).items() if value is not None or name in _ALWAYS}
        return {"rollout_id": step, **present}


_ALWAYS = ("prompt", "response", "reward", "label")  # in every row, null or not


class RunFiles:
    """Appends to, cuts back and reads the files of one run.

    Args:
        output_dir: Their folder.
        metrics_max_bytes: The bound of metrics.jsonl; None for none. Only appending to a file looks at it.

    >>> import tempfile
    >>> files = RunFiles(Path(tempfile.mkdtemp()))
    >>> for step in range(3):
    ...     files.append_metrics(step, {"rollout/reward": step / 2})
    >>> files.drop_from(1)
    0
    >>> files.read_metrics()
    [{'step': 0, 'rollout/reward': 0.0}]
    """

    def __init__(self, output_dir: Path, metrics_max_bytes: int | None = None) -> None:
        self.output_dir = output_dir
        self._metrics_max_bytes = metrics_max_bytes
        self._metrics = output_dir / METRICS
        self._samples = output_dir / SAMPLES

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add one row. A step may be given in several rows (training, then evaluation); reading joins them.

        Raises ``WriteFailed`` if the disk is full.
        """
        append(self._metrics, [{"step": step, **values}])
        if self._metrics_max_bytes is not None and self._metrics.stat().st_size > self._metrics_max_bytes:
            thin(self._metrics, self._metrics_max_bytes)

    def append_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Add one row per sample. Raises ``WriteFailed`` if the disk is full."""
        append(self._samples, (sample.row(step) for sample in samples))

    def read_metrics(self) -> list[dict[str, float]]:
        """Return one row per step, in order of steps; a null reads as NaN.

        Raises:
            ValueError: A line is damaged; the message names it or its file.
        """
        by_step: dict[int, dict[str, float]] = {}
        for row in read(self._metrics, "step"):
            numbers = {name: math.nan if value is None else value for name, value in row.items()}
            by_step.setdefault(row["step"], {}).update(numbers)
        return [by_step[step] for step in sorted(by_step)]

    def drop_from(self, step: int) -> int | None:
        """Forget this step and all later ones, which the resumed run repeats; give the last step that is left."""
        last = drop_from(self._metrics, "step", step)
        SampleFile(self._samples).cut(step)
        return last

    def mark_ended_early(self, step: int) -> None:
        """Note that the run came to its end after ``step``, with nothing left to train on."""
        path = self.output_dir / ENDED_EARLY
        new = self.output_dir / f".{ENDED_EARLY}"
        with naming_disk(path, new):
            new.write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
            new.replace(path)

    def mark_end(self, state: str, why: str) -> None:
        """Note how the run ended: "finished", "stopped" or "failed", and why in one line."""
        path = self.output_dir / END
        with naming_disk(path):
            path.write_text(dump_line({"state": state, "why": why}), encoding="utf-8", errors=_ERRORS)

    @property
    def end(self) -> tuple[str, str] | None:
        """The state and the reason from ``mark_end``; None without its note, or if that is damaged."""
        try:
            note = json.loads((self.output_dir / END).read_text(encoding="utf-8"))
            return str(note["state"]), str(note["why"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def forget_end(self) -> None:
        """Remove the notes of ``mark_ended_early`` and ``mark_end``: the run continues."""
        for name in (ENDED_EARLY, END):
            (self.output_dir / name).unlink(missing_ok=True)

    @property
    def ended_early_after(self) -> int | None:
        """The step from ``mark_ended_early``; None without its note, or if that is damaged: a resumed run writes it."""
        try:
            return int(json.loads((self.output_dir / ENDED_EARLY).read_text(encoding="utf-8"))["step"])
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None

    @property
    def run(self) -> RunIdentity | None:
        """The run that the folder belongs to; None if run.json does not say: it is missing, damaged or of old."""
        try:
            header = json.loads((self.output_dir / FILE_NAME).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return RunIdentity.from_state(header) if isinstance(header, dict) else None

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no metrics and no answers of any run."""
        return not self._metrics.exists() and not self._samples.exists()

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run into ``earlier-1``, ``earlier-2``…; return that folder, None if none was."""
        # run.json last: if this is killed, it still states whose files are left.
        names = (TENSORBOARD, REPORT, *_OF_RUN)
        present = [self.output_dir / name for name in names if (self.output_dir / name).exists()]
        if not present:
            return None
        number = 1
        while (folder := self.output_dir / f"earlier-{number}").exists():
            number += 1
        folder.mkdir()
        for path in present:
            path.rename(folder / path.name)
        return folder


def why_not_written(path: Path) -> str | None:
    """Return why a command does not write ``path``, as the end of a message: it is a folder, or a file of a run.

    Folders above it are created.
    """
    if path.is_dir():
        return "is a folder; give a file in it"
    if path.name in _OF_RUN and (path.parent / FILE_NAME).exists():
        return "is a file of a run, which would be lost; give another file"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"its folder cannot be created ({error.strerror}); give another file"
    return None
