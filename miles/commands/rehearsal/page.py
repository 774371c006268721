"""The page of a rehearsal: one HTML file with pictures of memory, of an iteration, and of the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from miles.base.host.machine import GIB
from miles.commands.rehearsal.memory import total
from miles.commands.rehearsal.record import Kind, Phase
from miles.commands.rehearsal.rehearsal import IMBALANCE, Advice, RankForecast, Rehearsal
from miles.commands.rehearsal.report import as_text
from miles.commands.rehearsal.timeline import timeline_of

WIDTH, BAR, LEFT = 900, 26, 170
LABEL = 150  # beside the bars of the timeline
MOST_DRAWN = 12  # micro-batches in the picture of the schedule, unless the pipeline needs more to fill
FORWARD, BACKWARD = ("#4269d0", "#97bbf5"), ("#efb118", "#f7d98b")  # of the parts of a stage, in turns
COLORS = {
    Kind.WEIGHTS: "#4269d0",
    Kind.GRADIENTS: "#efb118",
    Kind.OPTIMIZER: "#ff725c",
    Kind.ACTIVATIONS: "#6cc5b0",
    Kind.LOGITS: "#3ca951",
    Kind.COMMUNICATION: "#a463f2",
    Kind.KV_CACHE: "#97bbf5",
    Kind.ENGINE: "#9c6b4e",
    Kind.RUNTIME: "#9498a0",
}
PHASES: Mapping[str, str] = {
    Phase.GENERATE: "#4269d0",
    Phase.SCORE: "#6cc5b0",
    Phase.TRAIN: "#efb118",
    Phase.REDUCE: "#a463f2",
    Phase.OPTIMIZE: "#ff725c",
    Phase.SYNC: "#9c6b4e",
}


def as_page(rehearsal: Rehearsal, advice: Sequence[Advice], elapsed: float) -> str:
    """Return the page, which needs no other file."""
    parts = ["<h1>What this run will need</h1>", _legend()]
    drawn = [(rank, "") for rank in rehearsal.ranks]
    if rehearsal.imbalanced is not None:
        drawn.append((rehearsal.imbalanced, f", its experts with {IMBALANCE:g} times the load"))
    for rank, note in drawn:
        parts += [
            f"<h2>Memory of rank {rank.trace.rank} (stage {rank.stage + 1} of {rehearsal.stages}){note}, GiB</h2>"
        ]
        parts += [_memory(rank, rehearsal.memory)]
    parts += ["<h2>Timeline of an iteration</h2>", _timeline(rehearsal)]
    if rehearsal.stages > 1:
        parts += ["<h2>Schedule of the pipeline</h2>", "<p>Blue: forward; orange: backward; empty: waiting.</p>"]
        parts += [_schedule(rehearsal)]
    parts += ["<h2>Report</h2>", f"<pre>{escape(as_text(rehearsal, advice, elapsed))}</pre>"]
    style = (
        ":root{color-scheme:light dark}svg text{fill:currentColor}"
        "body{font:14px system-ui;margin:2em auto;max-width:75em}pre{overflow-x:auto;font-size:12px}i{padding:0 .7em}"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Rehearsal</title>"
        f"<style>{style}</style>" + "\n".join(parts) + "</html>\n"
    )


def _legend() -> str:
    return "<p>" + " ".join(f"<i style='background:{color}'></i>{kind}" for kind, color in COLORS.items()) + "</p>"


def _memory(rank: RankForecast, memory: int) -> str:
    """Draw a bar per phase; the line is what the device has."""
    scale = (WIDTH - LEFT - 70) / max(memory, rank.peak)
    shapes = []
    for row, (phase, usage) in enumerate(rank.phases.items()):
        top, left = row * (BAR + 6), float(LEFT)
        shapes.append(f"<text x=0 y={top + 18}>{phase}</text>")
        for kind, color in COLORS.items():
            width = usage.get(kind, 0) * scale
            if width > 0:
                title = f"<title>{kind}: {usage[kind] / GIB:.2f} GiB</title>"
                shapes.append(
                    f"<rect x={left:.1f} y={top} width={width:.1f} height={BAR} fill='{color}'>{title}</rect>"
                )
            left += width
        shapes.append(f"<text x={left + 5:.1f} y={top + 18}>{total(usage) / GIB:.1f}</text>")
    height = len(rank.phases) * (BAR + 6)
    edge = LEFT + memory * scale
    shapes.append(f"<line x1={edge:.1f} x2={edge:.1f} y1=0 y2={height} stroke=red stroke-dasharray=4 />")
    return f"<svg width={WIDTH} height={height}>{''.join(shapes)}</svg>"


def _timeline(rehearsal: Rehearsal) -> str:
    """Draw a bar per phase and side; a side that waits has a dashed one."""
    timeline = timeline_of(rehearsal)
    if timeline is None:
        return "<p>None: the engines have no room to generate.</p>"
    end = max(span.start + span.length for lane in timeline.lanes for span in lane.spans)
    scale = (WIDTH - LEFT - LABEL) / (end or 1.0)
    shapes, top, side = [], 0, ""
    for lane in timeline.lanes:
        if lane.side != side:
            side = lane.side
            shapes.append(f"<text x=0 y={top + 18} font-weight=bold>{side}</text>")
            top += BAR
        shapes.append(f"<text x=10 y={top + 18}>{lane.name}</text>")
        right = float(LEFT)
        fill = PHASES.get(lane.name)
        look = f"fill='{fill}'" if fill else "fill=none stroke=currentColor stroke-dasharray=4"
        for span in lane.spans:
            left, width = LEFT + span.start * scale, span.length * scale
            shapes.append(
                f"<rect x={left:.2f} y={top} width={width:.2f} height={BAR} {look}>"
                f"<title>{lane.side}, {lane.name}: {lane.seconds}</title></rect>"
            )
            right = left + width
        shapes.append(f"<text x={right + 5:.1f} y={top + 18}>{lane.seconds}</text>")
        top += BAR + 6
    how = " Generation runs beside training." if timeline.overlaps else ""
    unknown = " The time of weight sync is not known." if rehearsal.sync is None else ""
    note = f"{timeline.seconds}, drawn at the middle of each range. Dashed: waiting.{how}{unknown}"
    return f"<p>{note}</p><svg width={WIDTH} height={top}>{''.join(shapes)}</svg>"


def _schedule(rehearsal: Rehearsal) -> str:
    """Draw who waits for whom if a backward pass takes as long as two forward passes."""
    stages, micro_batches = rehearsal.stages, rehearsal.worst.trace.micro_batches
    drawn = min(micro_batches, max(MOST_DRAWN, 2 * stages))
    tasks = list(one_forward_one_backward(stages, drawn, rehearsal.chunks))
    end = max(task.start + task.length for task in tasks)
    unit, shapes = (WIDTH - LEFT) / end, []
    for task in tasks:
        colors = FORWARD if task.is_forward else BACKWARD
        kind = "forward" if task.is_forward else "backward"
        part = f", part {task.chunk + 1} of {rehearsal.chunks}" if rehearsal.chunks > 1 else ""
        shapes.append(
            f"<rect x={LEFT + task.start * unit:.1f} y={task.stage * (BAR + 4)} "
            f"width={task.length * unit * 0.95:.1f} height={BAR} fill='{colors[task.chunk % len(colors)]}'>"
            f"<title>micro-batch {task.number + 1}, {kind}{part}</title></rect>"
        )
    shapes += [f"<text x=0 y={stage * (BAR + 4) + 18}>stage {stage + 1}</text>" for stage in range(stages)]
    note = f"<p>The first {drawn} of {micro_batches} micro-batches.</p>" if drawn < micro_batches else ""
    return f"<svg width={WIDTH} height={stages * (BAR + 4)}>{''.join(shapes)}</svg>{note}"


class Task(NamedTuple):
    """One pass of a micro-batch through a part of the model, in units of a forward pass."""

    stage: int
    is_forward: bool
    number: int  # of the micro-batch
    chunk: int
    start: int
    length: int


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Iterator[Task]:
    """Yield the tasks of the schedule of that name, interleaved if a stage has several ``chunks``.

    Interleaved (Narayanan et al., 2021, §2.2; Megatron's ``forward_backward_pipelining_with_interleaving``), a stage
    takes one micro-batch per stage through a chunk before it begins with the next one.
    """
    step = stages if chunks > 1 else micro_batches
    groups = [range(first, min(first + step, micro_batches)) for first in range(0, micro_batches, step)]
    forward = [(number, chunk) for group in groups for chunk in range(chunks) for number in group]
    backward = [(number, chunks - 1 - chunk) for number, chunk in forward]
    orders = []
    for stage in range(stages):
        waiting = stages - stage - 1
        ahead = min(waiting if chunks == 1 else 2 * waiting + (chunks - 1) * stages, len(forward))
        order = [(True, *task) for task in forward[:ahead]]
        for i in range(len(forward) - ahead):
            order += [(True, *forward[ahead + i]), (False, *backward[i])]
        orders.append(order + [(False, *task) for task in backward[len(forward) - ahead :]])
    ended: dict[tuple[int, bool, int, int], int] = {}
    free, done = [0] * stages, [0] * stages
    while any(done[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            while done[stage] < len(orders[stage]):
                is_forward, number, chunk = orders[stage][done[stage]]
                before = _before(stage, is_forward, number, chunk, stages, chunks)
                if before is not None and before not in ended:
                    break
                start = max(free[stage], 0 if before is None else ended[before])
                length = 1 if is_forward else 2
                ended[stage, is_forward, number, chunk] = free[stage] = start + length
                done[stage] += 1
                yield Task(stage, is_forward, number, chunk, start, length)


def _before(
    stage: int, is_forward: bool, number: int, chunk: int, stages: int, chunks: int
) -> tuple[int, bool, int, int] | None:
    """Return the task whose result a task waits for; None for the first."""
    if is_forward:
        place = chunk * stages + stage - 1
        return None if place < 0 else (place % stages, True, number, place // stages)
    place = chunk * stages + stage + 1
    if place == stages * chunks:
        return stage, True, number, chunk
    return place % stages, False, number, place // stages
