"""The run in the terminal: seconds per phase, a line per step, progress, and all of it as JSON lines."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.text import Text

from miles.base.text import one_line
from miles.observe.run_files import RunHeader, SampleRecord, dump_line
from miles.types.metrics import Metric, held_out_metrics


class PhaseTimer:
    """Adds up the seconds of named phases until they are read.

    >>> timer = PhaseTimer()
    >>> with timer.phase("generate"):
    ...     timer.add("sync_weights", 0.25)  # measured elsewhere, in another process say
    >>> sorted(timer.metrics())
    ['time/generate', 'time/step', 'time/sync_weights']
    """

    def __init__(self, on_phase: Callable[[str | None], None] = lambda name: None) -> None:
        """Begin.

        Args:
            on_phase: Called with the name of each phase when it begins, and when a phase within it has ended; with
                None when the outermost has ended.
        """
        self._on_phase = on_phase
        self._running: list[str] = []
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time until the block ends, even by an error, to ``name``. A nested phase counts in both."""
        start = time.perf_counter()
        self._running.append(name)
        self._on_phase(name)
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)
            self._running.pop()
            self._on_phase(self._running[-1] if self._running else None)

    def add(self, name: str, seconds: float) -> None:
        """Add time measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """Return ``time/<phase>`` in seconds, and reset them.

        ``time/step`` is the wall time since the last reading, phases or not, unless a phase named ``step`` was timed.
        """
        now = time.perf_counter()
        seconds = {"step": now - self._started, **self._seconds}
        self._seconds, self._started = {}, now
        return {f"time/{name}": value for name, value in seconds.items()}

    def add_to(self, row: dict[str, Metric], generated_during: str) -> None:
        """Add ``metrics()`` to a row, and the tokens per second of the phase that generated them."""
        row |= {name: Metric(seconds) for name, seconds in self.metrics().items()}
        if "rollout/tokens" in row:
            row["perf/tokens_per_second"] = Metric(row["rollout/tokens"].value, row[f"time/{generated_during}"].value)


# Progress on a terminal: of a long phase ("generate  37 of 64 groups"), and of loading before the first phase.


SECONDS = 1.0  # between two questions

Details = Mapping[str, Callable[[], str | None]]  # by phase; None: not known


class PhaseProgress:
    """Shows the progress of the current phase, which a thread asks for every second.

    Args:
        details: The function to ask in each phase. It must return soon.
        show: Shows the phase and the answer.
        note: Prints a sentence, once per phase whose question has failed. The run continues, and so do the questions.
        seconds: The time between two questions.
    """

    def __init__(
        self, details: Details, show: Callable[[str], None], note: Callable[[str], None], seconds: float = SECONDS
    ) -> None:
        self._details = details
        self._show = show
        self._note = note
        self._noted: set[str] = set()  # phases
        self._seconds = seconds
        self._phase: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phase-progress", daemon=True)
        self._thread.start()

    def enter(self, phase: str | None) -> None:
        """Begin a phase; None ends it."""
        self._phase = phase

    def close(self) -> None:
        """Stop asking."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            phase = self._phase
            if phase is not None and phase in self._details:
                answer = self._ask(phase)
                if answer is not None and phase == self._phase:
                    self._show(f"{phase}  {answer}")

    def _ask(self, phase: str) -> str | None:
        try:
            return self._details[phase]()
        except Exception as error:  # whatever it is, the work itself reports it
            if phase not in self._noted:
                self._noted.add(phase)
                reason = one_line(f"{type(error).__name__}: {error}", 200)
                self._note(f"note: how far {phase} is cannot be shown ({reason})")
            return None


class Loading:
    """Names on a terminal the work of a run before its first phase, with a sign of life; elsewhere it prints nothing.

    Args:
        log_format: ``--log-format``: only ``text`` shows it.
        console: Replaceable for tests.
    """

    def __init__(self, log_format: str, console: Console | None = None) -> None:
        terminal = console or Console()
        self._status: Status | None = None
        if terminal.is_terminal and log_format == "text":
            self._status = terminal.status("loading")
            self._status.start()

    def show(self, what: str) -> None:
        """Name the current work."""
        if self._status is not None:
            self._status.update(f"loading: {what}")

    def close(self) -> None:
        """Remove the line. Closing twice is harmless."""
        if self._status is not None:
            self._status.stop()


# Standard output and error as JSON, one object per line: ``--log-format json``.


Level = Literal["info", "error"]


def json_line(level: Level, event: str, fields: Mapping[str, Any]) -> str:
    """Return one line of the log: ``time`` (UTC, ISO 8601), ``level``, ``event``, and the fields of the event.

    A field with one of these three names is left out. The line is ASCII, whatever the terminal's encoding.
    """
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    fixed = {"time": stamp, "level": level, "event": event}
    return dump_line({**fixed, **fields, **fixed}, ascii_only=True)


def print_event(event: str, fields: Mapping[str, Any]) -> None:
    """Print an event of the run in the block of ``as_json_lines``."""
    stream: Any = sys.stdout
    stream.write_event(event, fields)


@contextmanager
def as_json_lines(is_on: bool) -> Iterator[None]:
    """Turn each line that the block prints, workers' lines and tracebacks included, into a JSON object.

    Lines of text are the event ``text``, or ``error`` if they go to standard error.

    Args:
        is_on: Whether to do so.
    """
    if not is_on:
        yield
        return
    before = sys.stdout, sys.stderr
    streams = _JsonStream(sys.stdout, "info", "text"), _JsonStream(sys.stderr, "error", "error")
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.end()
        sys.stdout, sys.stderr = before


class _JsonStream:
    """Pass each line of text on to ``stream`` as a JSON object."""

    def __init__(self, stream: TextIO, level: Level, event: str) -> None:
        self._stream = stream
        self._level: Level = level
        self._event = event
        self._writing = threading.RLock()
        self._rests: dict[int, str] = {}  # of unfinished lines, by thread

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        with self._writing:
            *lines, rest = (self._rests.pop(thread, "") + text).split("\n")
            if rest:
                self._rests[thread] = rest
            for line in lines:
                if line.strip():
                    self._stream.write(json_line(self._level, self._event, {"text": line.rstrip("\r")}))
        return len(text)

    def write_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write an event of the run."""
        with self._writing:
            self._stream.write(json_line(self._level, event, fields))
            self._stream.flush()

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def end(self) -> None:
        with self._writing:
            for rest in self._rests.values():
                self._stream.write(json_line(self._level, self._event, {"text": rest}))
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# The run in the terminal: one line of at most 80 columns per step, the time that is left, and the phases that take
# long.
#
# On a terminal a bar below the lines shows the phase and its progress; elsewhere a long one is reported every minute,
# and for the first time of each phase after 15 s.
# ``--log-format json`` prints the same as JSON objects (``JsonSink``).


WIDTH = 80
LONG_PHASE_SECONDS = 60.0
FIRST_SECONDS = 15.0  # of the first time that a phase runs: it compiles and fills caches
LONGEST_SECONDS = 1e10
_MOST_ANSWERS = 8  # of an iteration
_ITERATIONS = 20  # of the newest, whose speed tells the time that is left

# The contents of a line, from left to right: the metric's name, its label, its format, and which one is left out first
# if not all fit (the highest number). A policy gradient's loss shows nothing: its value is near 0 however well it
# learns.
_COLUMNS = (
    ("rollout/reward", "reward", ".2f", 0),
    ("train/loss", "loss", ".4g", 1),
    ("train/value_loss", "value", ".3g", 3),
    ("train/grad_norm", "grad", ".2g", 4),
    ("train/kl_loss", "kl", ".1g", 5),
    ("rollout/response_length", "length", ".0f", 6),
)
_POLICY_GRADIENT = "train/pg_loss"


def trains(values: Mapping[str, float]) -> bool:
    """Return whether a row belongs to a step, and not to an evaluation before the first."""
    return any(name.startswith(("train/", "rollout/")) for name in values)


class TimeLeft:
    """Estimate the seconds that are left from the speed of the newest iterations.

    >>> left = TimeLeft(total_steps=10)
    >>> [left.log(step, {"train/loss": 0.0, "time/step": 3.0}) for step in (1, 2, 3)]
    [None, 24.0, 21.0]
    """

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._iterations: deque[tuple[int, float]] = deque(maxlen=_ITERATIONS)  # steps and seconds
        self._counted = 0  # iterations
        self._last: int | None = None
        self._steps = 0  # of the iteration in progress

    def log(self, step: int, values: Mapping[str, float]) -> float | None:
        """Read a row; return the seconds that are left after it, from the second step on.

        The first two iterations do not count once there is a later one: they compile and fill caches. Step 0, an
        evaluation, never counts.
        """
        if not trains(values):
            self._last = step
            return None
        self._steps += 1 if self._last is None else step - self._last
        self._last = step
        if "time/step" in values:
            if self._counted in (1, 2):
                self._iterations.popleft()
            self._iterations.append((self._steps, values["time/step"]))
            self._counted += 1
            self._steps = 0
        steps = sum(steps for steps, _ in self._iterations)
        seconds = sum(seconds for _, seconds in self._iterations)
        if not steps or (self._counted < 2 and steps + self._steps < 2):
            return None
        return seconds / steps * max(0, self._total - step)


def in_words(seconds: float) -> str:
    """Spell a duration: ``42 s``, ``1m30s``, ``3h05m``, ``2d04h``; ``?`` if it is no duration.

    >>> [in_words(seconds) for seconds in (4.24, 90, 3700, 200_000, 10_000_000)]
    ['4 s', '1m30s', '1h01m', '2d07h', '115d']
    """
    if not 0 <= seconds < LONGEST_SECONDS:
        return "?"
    total = round(seconds)
    for size, name, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if total >= size:
            large = total // size
            return f"{large}{name}" if large >= 100 else f"{large}{name}{total % size // smaller_size:02d}{smaller}"
    return f"{total} s"


def step_line(
    step: int,
    values: Mapping[str, float],
    total: int | None = None,
    left: float | None = None,
    first: Mapping[str, float] | None = None,
) -> Text:
    """Return the line of one step, of at most 80 columns. Metrics that the step lacks, or that do not fit, are absent.

    Args:
        step: The optimizer step.
        values: Its metrics.
        total: The steps of the run.
        left: The seconds that are left.
        first: The value of each evaluation set in the first evaluation of the run, to compare the newest with.
    """
    number = f"{step:>{len(str(total))}}/{total}" if total else f"{step:>4}"
    took = values.get("time/step")
    timing = [] if took is None else [("", f"{took:.1f} s" if 0 <= took < 100 else in_words(took))]
    timing += [("left", in_words(left))] if left is not None else []
    hidden = "train/loss" if _POLICY_GRADIENT in values else None
    parts = [
        (rank, label, _spelled(values[name], spec))
        for name, label, spec, rank in _COLUMNS
        if name in values and name != hidden
    ]
    sets = _held_out(values)
    if len(sets) == 1:
        [(only, now)] = sets.items()
        change = "" if first is None or only not in first else f" ({now - first[only]:+.2f})"
        place = 1 if "rollout/reward" in values else 0  # after the reward
        parts.insert(place, (2, "held-out", _spelled(now, ".2f") + change))
    fixed = len(f"step {number}") + sum(2 + len(f"{label} {value}".strip()) for label, value in timing)
    while parts and fixed + sum(3 + len(label) + len(value) for _, label, value in parts) > WIDTH:
        parts.remove(max(parts, key=lambda part: part[0]))
    line = Text(f"step {number}", style="cyan")
    for label, value in [*((label, value) for _, label, value in parts), *timing]:
        line.append("  ")
        line.append(f"{label} " if label else "", style="dim")
        line.append(value, style="bold green" if label == "held-out" else "bold")
    return line


def answer_line(sample: SampleRecord) -> str:
    """Return the line of an answer, of at most 80 columns: its end, where most tasks have the result.

    >>> answer_line(SampleRecord("", "so 3 * 4 = 12", 1.0, "12", "completed"))
    '  answer "so 3 * 4 = 12"  label 12  reward 1.00'
    """
    label = "" if sample.label is None else f"  label {one_line(str(sample.label), 20)}"
    facts = label + ("" if sample.reward is None else f"  reward {sample.reward:.2f}")
    room = WIDTH - len(facts) - len('  answer ""')
    text = sample.response if len(sample.response) <= room else f"…{sample.response[1 - room :]}"
    return f'  answer "{one_line(text, room)}"{facts}'


def held_out_lines(values: Mapping[str, float]) -> list[str]:
    """Return lines with the accuracy or the reward on each evaluation set, if there are several."""
    sets = _held_out(values)
    if len(sets) < 2:
        return []
    lines = ["held-out"]
    for name, value in sets.items():
        part = f"{name} {value:.2f}"
        if len(lines[-1]) + 2 + len(part) > WIDTH and lines[-1] != "held-out":
            lines.append(" " * len("held-out"))
        lines[-1] += f"  {part}"
    return lines


def _held_out(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[metric] for name, metric in held_out_metrics(values).items()}


def _spelled(value: float, spec: str) -> str:
    text = format(value, spec)
    return text if len(text) <= 9 else f"{value:.2e}"


def _sampling(header: RunHeader) -> str | None:
    """Return at which temperatures a run with held-out prompts answers; None for others."""
    evaluation = header.settings.get("evaluation", {})
    held_out = evaluation.get("eval_temperature")
    trained = header.settings.get("rollout", {}).get("rollout_temperature")
    if evaluation.get("eval_prompt_data") is None or held_out is None or trained is None:
        return None
    greedy = ", which is greedy" if held_out == 0 else ""
    return f"training answers at temperature {trained:g}, held-out ones at temperature {held_out:g}{greedy}"


class RaisingConsole(Console):
    """A console that raises ``BrokenPipeError`` if its pipe is closed; rich would exit without a message."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught; the run then prints why it stops and how to resume it."""
        raise


class ConsoleSink:
    """Prints the header at once, then one line per step. ``console`` is replaceable for tests."""

    def __init__(self, header: RunHeader, output_dir: str, console: Console | None = None) -> None:
        self._console = console or RaisingConsole()
        self._total = header.total_steps
        self._left = TimeLeft(header.total_steps)
        self._first: dict[str, float] = {}  # of the first evaluation, by set
        self._next_answer = 0  # the step after which an answer is printed
        self._has_noted_equal_rewards = False
        self._only_generates = header.settings.get("rollout", {}).get("debug_rollout_only", False)
        self._progress: Progress | None = None
        self._print(Text.assemble(("objective  ", "dim"), header.objective_words))
        self._print(Text.assemble(("output     ", "dim"), output_dir))
        if (sampling := _sampling(header)) is not None:
            self._print(Text.assemble(("sampling   ", "dim"), sampling))
        if self._console.is_terminal:
            self._progress = self._start_bar(header.total_steps)
        self._phases = None if self._progress is not None else LongPhases(self.note)
        self._details: PhaseProgress | None = None

    def watch(self, details: Details) -> None:
        """Show the progress of each phase in the bar from now on. Without a terminal nothing is asked."""
        if self._progress is not None:
            self._details = PhaseProgress(details, self._describe, self.note)

    def _describe(self, text: str) -> None:
        assert self._progress is not None
        self._progress.update(self._bar, description=text)

    def _start_bar(self, total_steps: int) -> Progress:
        columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _LeftColumn())
        progress = Progress(*columns, TextColumn("{task.description}"), console=self._console)
        self._bar = progress.add_task("", total=total_steps, left=None)
        progress.start()
        return progress

    def note(self, text: str) -> None:
        """Print one sentence above the bar."""
        self._print(text)

    def _print(self, text: Text | str) -> None:
        """Print one line, never wrapped: a log file keeps one line per step."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def phase(self, name: str | None) -> None:
        """Name the phase in the bar, or time it for the lines about long phases."""
        if self._progress is not None:
            self._describe(name or "")
            if self._details is not None:
                self._details.enter(name)
        elif self._phases is not None:
            self._phases.enter(name)

    def resume(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Print where the run continues, and compare with its first evaluation from now on."""
        if step <= self._total:
            self._print(f"continues at step {step} of {self._total}")
        for row in rows:
            self._first = _held_out(row) | self._first

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Print the first answer after the first iteration and after each tenth of the run.

        A run that only generates prints one to each of the first prompts: what it answers is all there is to see.
        """
        if step < self._next_answer:
            return
        answers = samples[:1]
        if self._only_generates:
            firsts = {sample.group: sample for sample in reversed(samples)}
            answers = list(firsts.values())[::-1][:_MOST_ANSWERS]
        for sample in answers:
            self._print(answer_line(sample))
        self._next_answer = step + max(1, self._total // 10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of the step; a step that trained moves the bar."""
        left = self._left.log(step, values)
        self._print(step_line(step, values, self._total, left, self._first))
        self._first = _held_out(values) | self._first
        for line in held_out_lines(values):
            self._print(line)
        has_equal_rewards = values.get("rollout/zero_std_groups") == 1 and values.get("train/grad_norm") == 0
        if has_equal_rewards and not self._has_noted_equal_rewards:
            self._has_noted_equal_rewards = True
            self._print("  all answers to each prompt had one reward, so this step had nothing to learn")
        if self._progress is not None and trains(values):
            self._progress.update(self._bar, completed=step, left=left)

    def close(self) -> None:
        """Stop the bar at its position and release the terminal."""
        if self._details is not None:
            self._details.close()
        if self._progress is not None:
            self._progress.stop()
        if self._phases is not None:
            self._phases.close()


class _LeftColumn(ProgressColumn):
    """The time that is left, from ``TimeLeft``: Rich's own forgets steps that take longer than 30 s."""

    def render(self, task: Task) -> Text:
        left = task.fields["left"]
        return Text("" if left is None else f"left {in_words(left)}")


class LongPhases:
    """Print the current phase of the run every minute of a long phase."""

    def __init__(self, say: Callable[[str], None], seconds: float = LONG_PHASE_SECONDS) -> None:
        self._say = say
        self._seconds = seconds
        self._phase: tuple[str, float] | None = None  # its name, and when it began
        self._due = seconds  # into the phase
        self._known: set[str] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="long-phases", daemon=True).start()

    def enter(self, name: str | None) -> None:
        """Begin a phase; None ends it."""
        self._due = self._seconds if name in self._known else min(FIRST_SECONDS, self._seconds)
        self._phase = None if name is None else (name, time.monotonic())
        if name is not None:
            self._known.add(name)

    def close(self) -> None:
        """Print no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds)):
            if (phase := self._phase) is None:
                continue
            name, began = phase
            took = time.monotonic() - began
            if took >= self._due:
                self._due += self._seconds
                self._say(f"  {name}: {in_words(took)} so far")


class JsonSink:
    """Prints the header, each step with all its metrics, and long phases as JSON objects (``as_json_lines``)."""

    def __init__(self, header: RunHeader, output_dir: str) -> None:
        self._left = TimeLeft(header.total_steps)
        self._total = header.total_steps
        self._phases = LongPhases(lambda text: print_event("phase", {"text": text.strip()}))
        facts = {"objective": header.objective_words, "output_dir": output_dir, "total_steps": header.total_steps}
        print_event("start", facts)

    def note(self, text: str) -> None:
        """Print one sentence."""
        print_event("text", {"text": text})

    def watch(self, details: Details) -> None:
        """Ask nothing: progress is for terminals."""

    def phase(self, name: str | None) -> None:
        """Time the phase, for the lines about long ones."""
        self._phases.enter(name)

    def resume(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """Print where the run continues."""
        print_event("resume", {"step": step, "total_steps": self._total})

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Print no answer: samples.jsonl has them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print a step: its number, the number of steps, the seconds left, and its metrics by their names."""
        left = self._left.log(step, values)
        fixed: dict[str, float] = {"step": step, "total_steps": self._total}
        if left is not None:
            fixed["seconds_left"] = round(left, 1)
        print_event("step", {**fixed, **values, **fixed})

    def close(self) -> None:
        """Print no more."""
        self._phases.close()
