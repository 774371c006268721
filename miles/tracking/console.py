"""The run in the terminal: one compact line per step, and a live progress bar on a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from miles.tracking.run_header import RunHeader

# What the line shows before and after held-out accuracy: the metric's name, its label and format.
_BEFORE_EVALUATION = (("rollout/reward", "reward", ".3f"),)
_AFTER_EVALUATION = (
    ("rollout/response_length", "length", ".1f"),
    ("train/pg_loss", "loss", ".4f"),
    ("train/value_loss", "value", ".4f"),
    ("train/entropy_loss", "entropy", ".3f"),
    ("train/ppo_kl", "ppo_kl", ".2e"),
    ("train/kl_loss", "kl", ".2e"),
    ("train/grad_norm", "grad", ".3f"),
    ("perf/tokens_per_second", "tok/s", ".0f"),
)


def _selected(values: Mapping[str, float], table: tuple[tuple[str, str, str], ...]) -> list[tuple[str, str]]:
    return [(label, format(values[name], spec)) for name, label, spec in table if name in values]


def _held_out(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """``eval/<set>/accuracy`` of every set; a lone set goes without its name."""
    sets = {
        name.removeprefix("eval/").removesuffix("/accuracy"): value
        for name, value in values.items()
        if name.startswith("eval/") and name.endswith("/accuracy")
    }
    return [("held-out" if len(sets) == 1 else f"held-out {name}", f"{value:.3f}") for name, value in sets.items()]


def _seconds(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the wall time of the step, then its phases, longest first."""
    phases = {name.removeprefix("time/"): value for name, value in values.items() if name.startswith("time/")}
    total = phases.pop("step", math.nan)
    longest_first = sorted(phases.items(), key=lambda item: -item[1])
    parts = [] if math.isnan(total) else [("step", f"{total:.1f}s")]
    return parts + [(name, f"{value:.1f}s") for name, value in longest_first if value >= 0.05]


def step_line(step: int, values: Mapping[str, float]) -> Text:
    """Return the compact line of one step; metrics that the step lacks are left out of it."""
    groups = [
        _selected(values, _BEFORE_EVALUATION) + _held_out(values) + _selected(values, _AFTER_EVALUATION),
        _seconds(values),
    ]
    line = Text(f"step {step:>4}", style="cyan")
    for group in filter(None, groups):
        line.append(" | ", style="dim")
        for position, (label, value) in enumerate(group):
            line.append("  " if position else "")
            line.append(label + " ", style="dim")
            line.append(value, style="bold green" if label.startswith("held-out") else "bold")
    return line


class ConsoleSink:
    """Prints the header at once, then one line per step. ``console`` is replaceable for tests."""

    def __init__(self, header: RunHeader, output_dir: str, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self.note(Text(header.title, style="bold"))
        self.note(Text.assemble(("objective  ", "dim"), header.objective_words))
        for line in header.objective_formula.splitlines():
            self.note(Text.assemble(("           ", "dim"), line))
        self.note(Text.assemble(("output     ", "dim"), output_dir))
        if self._console.is_terminal:
            self._progress = self._start_bar(header.total_steps)

    def _start_bar(self, total_steps: int) -> Progress:
        columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
        self._bar = progress.add_task("steps", total=total_steps)
        progress.start()
        return progress

    def note(self, text: Text | str) -> None:
        """Print one line above the bar, never wrapped: a log file keeps one line per step."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line of the step; a step that trained moves the bar."""
        self.note(step_line(step, values))
        if self._progress is not None and any(name.startswith(("train/", "rollout/")) for name in values):
            self._progress.update(self._bar, completed=step)

    def close(self) -> None:
        """Stop the bar where it is and release the terminal."""
        if self._progress is not None:
            self._progress.stop()
