"""Compare what layouts did on real ranks (measured.py) with their rehearsals.

    PYTHONPATH=.:tests/fast/support python -m tests.fast.commands.rehearsal.agreement FOLDER [LAYOUT...]

prints a table of layouts that were measured in FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rehearsed_layouts import LAYOUTS

from miles.commands.rehearsal.meter import Phase
from miles.commands.rehearsal.rehearsal import total
from miles.commands.rehearsal.trace import RankTrace, trace_rank
from miles.config.settings import Settings
from miles.config.validate import validate
from tests.fast.commands.rehearsal.host_meter import on_this_host
from tests.fast.commands.rehearsal.measured import OPTIMIZER, PASSES, SCORE, Measured, plain_masks

PHASES = {SCORE: (Phase.SCORE,), PASSES: (Phase.TRAIN, Phase.REDUCE), OPTIMIZER: (Phase.OPTIMIZE,)}


@dataclass(frozen=True)
class Figure:
    """One number of one rank, as rehearsed and as measured."""

    rank: int
    name: str
    rehearsed: float
    measured: float

    @property
    def tolerance(self) -> float:
        """How far the two may be apart: FLOP are counted alike, and memory is rounded up by no allocator here."""
        return 0.01 if self.name.startswith("FLOP") else 0.1

    @property
    def distance(self) -> float:
        """The difference relative to what was measured."""
        return abs(self.rehearsed - self.measured) / self.measured if self.measured else float(self.rehearsed != 0)


def figures(name: str, folder: Path) -> list[Figure]:
    """Return every figure of a layout whose measurements are in ``folder``.

    ``held`` are bytes between steps, ``peak …`` the bytes beyond these, ``memory …`` their sum, ``FLOP …`` the FLOP of
    a micro-batch, and ``sent …`` the bytes of a kind of collective in all parts of a step of as many micro-batches. The
    peak of the optimizer's part is not compared alone: a norm that is clipped takes a copy of a gradient, and the
    gradients that are measured are smaller.
    """
    layout = LAYOUTS[name]
    settings: Settings = validate(layout.settings(folder)).settings
    traces: dict[Any, RankTrace] = {}
    all_figures = []
    for rank in range(layout.ranks):
        fields = json.loads((folder / f"measured {name} {rank}.json").read_text())
        measured = Measured(**fields)
        stage = rank // settings.dims.ranks_per_stage
        of_context = settings.dims.token_rank(rank) % settings.dims.context_parallel_size
        alike = stage, of_context, measured.load  # other ranks do the same
        if alike not in traces:
            with plain_masks(), on_this_host():
                traces[alike] = trace_rank(settings, rank, measured.load)
        all_figures += _of_rank(rank, traces[alike], measured)
    return all_figures


def _of_rank(rank: int, trace: RankTrace, measured: Measured) -> list[Figure]:
    held = total(trace.resident)
    all_figures = [Figure(rank, "held", held, measured.held)]
    part_of_step = measured.micro_batches / trace.micro_batches
    sent: Counter[str] = Counter()
    for part, phases in PHASES.items():
        peak = max((total(trace.peaks[phase]) for phase in phases if phase in trace.peaks), default=held)
        if part != OPTIMIZER:
            all_figures.append(Figure(rank, f"peak {part}", peak - held, measured.peaks[part]))
        all_figures.append(Figure(rank, f"memory {part}", peak, measured.held + measured.peaks[part]))
        flops = sum(trace.tallies[phase].flops for phase in phases if phase in trace.tallies)
        all_figures.append(
            Figure(rank, f"FLOP {part}", flops / trace.micro_batches, measured.flops[part] / measured.micro_batches)
        )
        for phase in phases:
            times = part_of_step if phase in (Phase.SCORE, Phase.TRAIN) else 1
            messages = trace.tallies[phase].messages if phase in trace.tallies else {}
            for message, count in messages.items():
                sent[f"{message.name} of {len(message.ranks)}"] += message.bytes * count * times
    counted = sum((Counter(part) for part in measured.sent.values()), Counter())
    for name in sorted({*sent, *counted}):
        all_figures.append(Figure(rank, f"sent {name}", sent[name], counted[name]))
    return all_figures


COLUMNS = ("held", "memory", "peak score", "peak passes", "FLOP", "sent")


def row(name: str, folder: Path) -> str:
    """Return a line of the table: the layout, and the largest distance of any rank in each column."""
    all_figures = figures(name, folder)
    cells = []
    for column in COLUMNS:
        distances = [figure.distance for figure in all_figures if figure.name.startswith(column) and figure.measured]
        cells.append(f"{max(distances):.1%}" if distances else "")
    return f"| {' | '.join([name, *cells])} |"


def main(folder: Path, names: list[str]) -> None:
    """Print the table."""
    chosen = [name for name in LAYOUTS if name in names or not names]
    if any(LAYOUTS[name].backend == "megatron" for name in chosen):
        from miles.training.megatron.cpu_support import support_cpu

        support_cpu()
    print(f"| layout | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}")
    for name in chosen:
        if (folder / f"measured {name} 0.json").exists():
            print(row(name, folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
