"""Write the figures of a rehearsal as text, as JSON and as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from html import escape
from typing import Any, NamedTuple

from miles.base.flags import count
from miles.base.host import GIB
from miles.commands.rehearsal.meter import MemoryKind, OperationCounts, Phase
from miles.commands.rehearsal.rehearsal import IMBALANCE, Alternative, RankForecast, Rehearsal, total, worst_phase
from miles.commands.rehearsal.roofline import NOTHING, Seconds, copies_sent, crosses_nodes, message_bytes, seconds
from miles.commands.rehearsal.trace import assumed_image, contract_data, contract_text, prompt_length, response_length
from miles.config.explain import explain_layout
from miles.config.settings import Settings


def as_text(rehearsal: Rehearsal, advice: Sequence[Alternative], elapsed: float) -> str:
    """Return the report of ``--rehearse``."""
    parts = [
        ("Assumed", _assumptions(rehearsal)),
        ("Memory of the worst rank, GiB", _memory(rehearsal)),
        ("Peak of each kind of rank, GiB", _ranks(rehearsal)),
        ("What would help", _advice(rehearsal, advice)),
        ("One optimizer step of the worst rank", _work(rehearsal)),
        ("Time", _time(rehearsal)),
        ("Loss", contract_text(rehearsal.settings)),
    ]
    text = "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in parts if lines)
    return f"{text}\n\nrehearsed in {elapsed:.0f} s, without weights and without a GPU"


def _assumptions(rehearsal: Rehearsal) -> list[str]:
    settings, size = rehearsal.settings, rehearsal.size
    experts = f", {_number(size.active)} of them active per token" if size.experts else ""
    lines = [
        f"model     {_number(size.parameters)} parameters{experts}",
        f"ranks     {'; '.join(explain_layout(settings)[:1])}, {settings.training.train_backend}",
        f"device    {rehearsal.device.name}, {rehearsal.memory / GIB:.1f} GiB, "
        f"{rehearsal.device.gpus_per_node} in a node",
        f"samples   {_prompt(settings)}, {response_length(settings)} of response, all alike",
        *_images(settings),
        f"batches   {_micro_batches(rehearsal)} of up to {rehearsal.worst.trace.tokens} tokens on a rank, per step",
    ]
    if size.experts and rehearsal.imbalanced is None:
        lines.append("experts   every rank of a stage has all of them, so its work is the same whichever tokens choose")
    elif size.experts:
        lines.append(f"experts   chosen equally often; below, the worst rank also with {IMBALANCE:g} times the load")
    return lines


def _prompt(settings: Settings) -> str:
    image = assumed_image(settings)
    note = "" if image is None else f", {image.counts[0]} of them of an image"
    return f"{prompt_length(settings)} tokens of prompt{note}"


def _images(settings: Settings) -> Iterator[str]:
    """Yield the size of the assumed images, and of all in the object store."""
    image, prompts = assumed_image(settings), settings.rollout.rollout_batch_size
    if image is None or prompts is None:
        return
    from miles.models.images import tensors_of  # a text model reads none of it

    width, height = image.sizes[0]
    stored = prompts * tensors_of(image).nbytes / GIB
    yield f"images    {width} x {height} pixels; {stored:.3g} GiB of an iteration in host memory, each prompt's once"


def _number(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"


def _micro_batches(rehearsal: Rehearsal) -> str:
    number = rehearsal.worst.trace.micro_batches
    return f"{number} micro-batch{'' if number == 1 else 'es'}"


def _memory(rehearsal: Rehearsal) -> list[str]:
    worst = rehearsal.worst
    kinds = [kind for kind in MemoryKind if any(usage.get(kind) for usage in worst.phases.values())]
    width = max(len(phase) for phase in worst.phases)
    lines = [" " * width + "".join(f"{kind:>14}" for kind in (*kinds, "total"))]
    for phase, usage in worst.phases.items():
        figures = [usage.get(kind, 0) for kind in kinds] + [total(usage)]
        lines.append(f"{phase:<{width}}" + "".join(f"{figure / GIB:>14.2f}" for figure in figures))
    lines += ["", _verdict(rehearsal)]
    return lines


def _verdict(rehearsal: Rehearsal) -> str:
    worst = rehearsal.worst
    spare = (rehearsal.memory - worst.peak) / GIB
    where = f"rank {worst.trace.rank} needs {worst.peak / GIB:.1f} GiB in the phase {worst_phase(worst.phases)}"
    if spare >= 0:
        return f"FITS: {where}; {spare:.1f} GiB of {rehearsal.memory / GIB:.1f} are left"
    return f"DOES NOT FIT: {where}; {-spare:.1f} GiB more than {rehearsal.memory / GIB:.1f}"


def _ranks(rehearsal: Rehearsal) -> list[str]:
    if len(rehearsal.ranks) == 1 and rehearsal.imbalanced is None:
        return []
    note = "experts of equal load" if rehearsal.size.experts else ""
    lines = [_rank(rehearsal, rank, note) for rank in rehearsal.ranks]
    if rehearsal.imbalanced is not None:
        lines.append(_rank(rehearsal, rehearsal.imbalanced, f"experts of {IMBALANCE:g} times the load"))
    return lines


def _rank(rehearsal: Rehearsal, rank: RankForecast, note: str) -> str:
    passes = seconds(rank.trace.tallies.get(Phase.TRAIN, OperationCounts()), rehearsal.device, Phase.TRAIN)
    stage = f"stage {rank.stage + 1} of {rehearsal.stages}" if rehearsal.stages > 1 else "every stage"
    words = f"rank {rank.trace.rank}, {stage}"
    peak, phase = rank.peak / GIB, worst_phase(rank.phases)
    return f"{words:<28}{peak:>8.1f} in {phase}; passes over a step {passes}" + (f"; {note}" if note else "")


def _advice(rehearsal: Rehearsal, advice: Sequence[Alternative]) -> list[str]:
    lines = []
    for option in advice:
        saved = (rehearsal.worst.peak - option.peak) / GIB
        fits = "fits" if option.peak <= rehearsal.memory else "does not fit"
        lines.append(
            f"{option.change.words:<52}{option.peak / GIB:>7.1f} GiB ({saved:.1f} less, {fits}); step {option.step}"
        )
    return lines


def _work(rehearsal: Rehearsal) -> list[str]:
    lines = [f"{'':<22}{'TFLOP':>10}{'GB moved':>12}{'GB sent':>10}{'collectives':>13}   seconds, alone"]
    for phase, tally in rehearsal.worst.trace.tallies.items():
        sent = sum(message_bytes(message) * n for message, n in tally.messages.items())
        times = sum(tally.messages.values())
        lines.append(
            f"{phase:<22}{tally.flops / 1e12:>10.2f}{tally.bytes / 1e9:>12.1f}{sent / 1e9:>10.2f}{times:>13.0f}   "
            f"{seconds(tally, rehearsal.device, phase)}"
        )
        lines += [f"  {line}" for line in _collectives(tally, rehearsal)]
    return lines


def _collectives(tally: OperationCounts, rehearsal: Rehearsal) -> Iterator[str]:
    groups: dict[tuple[str, int, bool], list[float]] = {}
    for message, times in tally.messages.items():
        key = message.name, len(message.ranks), crosses_nodes(message.ranks, rehearsal.device)
        entry = groups.setdefault(key, [0.0, 0.0])
        entry[0] += times
        entry[1] += times * message_bytes(message)
    for (name, ranks, crosses), (number, size) in sorted(groups.items(), key=lambda item: -item[1][1]):
        where = "over nodes" if crosses else "in a node"
        yield f"{number:.0f} x {name} of {ranks} ranks {where}: {size / 1e9:.3g} GB"


def _time(rehearsal: Rehearsal) -> list[str]:
    settings, generation = rehearsal.settings, rehearsal.generation
    steps = count(settings.steps_per_iteration, "step")
    lines = [
        f"a step       {rehearsal.step} on {rehearsal.device.name} (data sheet; the long end is "
        "half the rate of products, no fusion, no overlap)",
        f"             model FLOP utilization {_mfu(rehearsal, rehearsal.step.high):.0%} to "
        f"{_mfu(rehearsal, rehearsal.step.low):.0%}",
        f"training     {rehearsal.training} per iteration of {steps}, scoring included",
    ]
    if rehearsal.stages > 1:
        lines.append(
            f"pipeline     {rehearsal.bubble:.0%} of the passes are waiting: {rehearsal.stages} stages, "
            f"{_micro_batches(rehearsal)}"
        )
    if generation.engines:
        lines += _generation(rehearsal)
    timeline = timeline_of(rehearsal)
    if timeline is not None:
        lines.append(f"iteration    {timeline.seconds}{_order(timeline)}")
        waits = (lane for lane in timeline.lanes if lane.name == WAITS)
        lines += [f"             the {lane.side} side waits {lane.seconds}" for lane in waits]
    return lines


def _generation(rehearsal: Rehearsal) -> list[str]:
    generation = rehearsal.generation
    low, high = rehearsal.balanced_tokens_per_second
    where = count(generation.engines, "engine") + f" of {count(generation.devices, 'device')}"
    took = f"{generation.duration} per iteration of {generation.tokens} tokens, on {where}"
    if generation.sequences:
        took += f", {generation.sequences} sequences at once on each"
    else:
        took = f"impossible on {where}: alongside its weights there is no room for the cache of one sequence"
    if rehearsal.sync is None:
        sync = "not known: files carry the weights, and the disk's speed is not"
    else:
        copies = copies_sent(rehearsal.settings, generation.engines)
        sync = f"{rehearsal.sync}: all weights go to one host, and leave it {count(copies, 'time')}"
    return [
        f"generation   {took}",
        f"balance      generation takes as long as training at {low:.0f} to {high:.0f} tokens/s of all engines",
        f"engine       {generation.weight_bytes / GIB:.1f} GiB of weights and {generation.cache_bytes / GIB:.1f} "
        f"GiB of KV cache on a device ({generation.kv_bytes_per_token / 1024:.1f} KiB per token)",
        f"weight sync  {sync}",
    ]


def _order(timeline: Timeline) -> str:
    if not any(lane.side is Side.ROLLOUT for lane in timeline.lanes):
        return ""
    return ", generation alongside training" if timeline.overlaps else ", generation before training"


def _mfu(rehearsal: Rehearsal, duration: float) -> float:
    """Return 6 FLOP per active parameter and token, over what all ranks could compute in ``duration`` seconds."""
    settings = rehearsal.settings
    flops = 6 * rehearsal.size.active * rehearsal.worst.trace.step_tokens * settings.dims.token_ranks
    rate = rehearsal.device.bf16 if settings.training.bf16 else rehearsal.device.fp32
    return flops / (rate * 1e12 * duration * settings.cluster.world_size) if duration else 0.0


def as_json(rehearsal: Rehearsal, advice: Iterable[Alternative], elapsed: float) -> dict[str, Any]:
    """Return every figure: bytes, FLOP and seconds."""
    settings = rehearsal.settings
    low, high = rehearsal.balanced_tokens_per_second if rehearsal.training.low else (None, None)
    return {
        "device": asdict(rehearsal.device),
        "memory_bytes": rehearsal.memory,
        "fits": rehearsal.worst.peak <= rehearsal.memory,
        "worst_rank": rehearsal.worst.trace.rank,
        "model": asdict(rehearsal.size),
        "layout": {
            "world_size": settings.cluster.world_size,
            "backend": settings.training.train_backend,
            "tensor": settings.megatron.tensor_model_parallel_size,
            "pipeline": rehearsal.stages,
            "context": settings.parallel.context_parallel_size,
            "expert": settings.megatron.expert_model_parallel_size,
            "token_ranks": settings.dims.token_ranks,
        },
        "samples": {"prompt_tokens": prompt_length(settings), "response_tokens": response_length(settings)},
        "ranks": [_rank_json(rank, rehearsal) for rank in rehearsal.ranks],
        "imbalanced": None if rehearsal.imbalanced is None else _rank_json(rehearsal.imbalanced, rehearsal),
        "advice": [
            {"flags": option.change.words, "peak_bytes": option.peak, "step_seconds": _range(option.step)}
            for option in advice
        ],
        "step_seconds": _range(rehearsal.step),
        "training_seconds": _range(rehearsal.training),
        "pipeline_bubble": rehearsal.bubble,
        "generation": {
            **{k: v for k, v in asdict(rehearsal.generation).items() if k != "duration"},
            "seconds": _range(rehearsal.generation.duration),
            "balanced_tokens_per_second": [low, high],
        },
        "weight_sync_seconds": None if rehearsal.sync is None else _range(rehearsal.sync),
        "iteration": _timeline_json(timeline_of(rehearsal)),
        "loss": contract_data(settings),
        "rehearsal_seconds": elapsed,
    }


def _timeline_json(timeline: Timeline | None) -> dict[str, Any] | None:
    """Return the lanes of the picture: ranges, and where each is drawn: starts and lengths at the middle of these."""
    if timeline is None:
        return None
    return {
        "seconds": _range(timeline.seconds),
        "generates_while_training": timeline.overlaps,
        "lanes": [
            {"side": lane.side, "name": lane.name, "seconds": _range(lane.seconds), "drawn": lane.spans}
            for lane in timeline.lanes
        ],
    }


def _rank_json(rank: RankForecast, rehearsal: Rehearsal) -> dict[str, Any]:
    return {
        "rank": rank.trace.rank,
        "stage": rank.stage,
        "peak_bytes": rank.peak,
        "peak_phase": worst_phase(rank.phases),
        "micro_batches": rank.trace.micro_batches,
        "phases": {phase: {k: v for k, v in usage.items() if v} for phase, usage in rank.phases.items()},
        "work": {
            phase: {
                "flop": tally.flops,
                "bytes": tally.bytes,
                "seconds": _range(seconds(tally, rehearsal.device, phase)),
                "collectives": [
                    {"name": m.name, "ranks": len(m.ranks), "count": n, "bytes": m.bytes}
                    for m, n in tally.messages.items()
                ],
            }
            for phase, tally in rank.trace.tallies.items()
        },
    }


def _range(seconds: Seconds) -> list[float | None]:
    return [number if number < float("inf") else None for number in (seconds.low, seconds.high)]


# The page of a rehearsal: one HTML file with pictures of memory, of an iteration, and of the pipeline's schedule.


WIDTH, BAR, LEFT = 900, 26, 170
LABEL = 150  # alongside the bars of the timeline
MOST_DRAWN = 12  # micro-batches in the picture of the schedule, unless the pipeline needs more to fill
FORWARD, BACKWARD = ("#4269d0", "#97bbf5"), ("#efb118", "#f7d98b")  # of the parts of a stage, alternately
COLORS = {
    MemoryKind.WEIGHTS: "#4269d0",
    MemoryKind.GRADIENTS: "#efb118",
    MemoryKind.OPTIMIZER: "#ff725c",
    MemoryKind.ACTIVATIONS: "#6cc5b0",
    MemoryKind.LOGITS: "#3ca951",
    MemoryKind.COMMUNICATION: "#a463f2",
    MemoryKind.KV_CACHE: "#97bbf5",
    MemoryKind.ENGINE: "#9c6b4e",
    MemoryKind.RUNTIME: "#9498a0",
}
PHASES: Mapping[str, str] = {
    Phase.GENERATE: "#4269d0",
    Phase.SCORE: "#6cc5b0",
    Phase.TRAIN: "#efb118",
    Phase.REDUCE: "#a463f2",
    Phase.OPTIMIZE: "#ff725c",
    Phase.SYNC: "#9c6b4e",
}


def as_page(rehearsal: Rehearsal, advice: Sequence[Alternative], elapsed: float) -> str:
    """Return the page, which needs no other file."""
    legend = " ".join(f"<i style='background:{color}'></i>{kind}" for kind, color in COLORS.items())
    parts = ["<h1>What this run will need</h1>", f"<p>{legend}</p>"]
    drawn = [(rank, "") for rank in rehearsal.ranks]
    if rehearsal.imbalanced is not None:
        drawn.append((rehearsal.imbalanced, f", its experts with {IMBALANCE:g} times the load"))
    for rank, note in drawn:
        where = f"rank {rank.trace.rank} (stage {rank.stage + 1} of {rehearsal.stages})"
        parts += [f"<h2>Memory of {where}{note}, GiB</h2>", _memory_chart(rank, rehearsal.memory)]
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


def _memory_chart(rank: RankForecast, memory: int) -> str:
    """Draw a bar per phase; the line is the device's memory."""
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
    """Draw a bar per phase and lane; a lane that waits has a dashed one."""
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
    how = " Generation runs alongside training." if timeline.overlaps else ""
    unknown = " The time of weight sync is not known." if rehearsal.sync is None else ""
    note = f"{timeline.seconds}, drawn at the middle of each range. Dashed: waiting.{how}{unknown}"
    return f"<p>{note}</p><svg width={WIDTH} height={top}>{''.join(shapes)}</svg>"


def _schedule(rehearsal: Rehearsal) -> str:
    """Draw who waits for whom if a backward pass takes as long as two forward passes."""
    stages, micro_batches = rehearsal.stages, rehearsal.worst.trace.micro_batches
    drawn = min(micro_batches, max(MOST_DRAWN, 2 * stages))
    tasks = list(one_forward_one_backward(stages, drawn, rehearsal.chunks))
    end = max(task.start + task.length for task in tasks)
    unit = (WIDTH - LEFT) / end
    shapes = []
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


class PipelinePass(NamedTuple):
    """One pass of a micro-batch through a part of the model, in units of a forward pass."""

    stage: int
    is_forward: bool
    number: int  # of the micro-batch
    chunk: int
    start: int
    length: int


def one_forward_one_backward(stages: int, micro_batches: int, chunks: int = 1) -> Iterator[PipelinePass]:
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
                yield PipelinePass(stage, is_forward, number, chunk, start, length)


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


# One iteration as a timeline: when generation and training run, and which waits for the other.
#
# Without ``--async-steps`` the two take turns. With it, generation runs alongside training, and both wait for the
# slower one before the engines get new weights (rollout/ordering.py); the timeline shows an iteration in the middle of
# a run. Starts and lengths are drawn at the middle of each range.


WAITS = "waits"


class Side(StrEnum):
    """Who is busy."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    BOTH = "both"


class Span(NamedTuple):
    """A piece of a lane, in seconds."""

    start: float
    length: float


@dataclass(frozen=True)
class Lane:
    """A phase of an iteration, or the wait of a side.

    Attributes:
        side: Who is busy, or waits.
        name: The phase, or ``WAITS``.
        seconds: Of all spans together.
        spans: At the middle of the range; one for each optimizer step, else one.
    """

    side: Side
    name: str
    seconds: Seconds
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """An iteration: its lanes, by side, and how long it takes."""

    lanes: tuple[Lane, ...]
    seconds: Seconds
    overlaps: bool  # generation and training run at the same time


def timeline_of(rehearsal: Rehearsal) -> Timeline | None:
    """Return the timeline of an iteration; None if the engines have no room to generate."""
    settings = rehearsal.settings
    generates = rehearsal.generation.engines > 0 and not settings.reads_samples
    generation = rehearsal.generation.duration if generates else NOTHING
    if not math.isfinite(generation.high):
        return None
    training, sync = rehearsal.training, rehearsal.sync or NOTHING
    overlaps = generates and settings.rollout.async_steps > 0
    begin = 0.0 if overlaps else _middle(generation)  # of training
    trainer = _trainer_lanes(rehearsal, begin)
    meet = max(_middle(generation), begin + _middle(training))  # then the engines get weights
    rollout: list[Lane] = []
    if generates:
        rollout.append(_lane(Side.ROLLOUT, Phase.GENERATE, generation, 0.0))
        if overlaps:
            rollout_waits, trainer_waits = _beyond(training, generation), _beyond(generation, training)
            trainer += _waits(Side.TRAINER, trainer_waits, begin + _middle(training), meet)
        else:
            rollout_waits, trainer_waits = training, generation
            trainer = _waits(Side.TRAINER, trainer_waits, 0.0, begin) + trainer
        rollout += _waits(Side.ROLLOUT, rollout_waits, _middle(generation), meet)
    updates = [_lane(Side.BOTH, Phase.SYNC, sync, meet)] if sync != NOTHING else []
    busy = Seconds(max(generation.low, training.low), max(generation.high, training.high))
    seconds = (busy if overlaps else generation + training) + sync
    return Timeline((*rollout, *trainer, *updates), seconds, overlaps)


def _trainer_lanes(rehearsal: Rehearsal, begin: float) -> list[Lane]:
    """Return the lanes of the trainer's phases: everything is scored before the first step."""
    settings = rehearsal.settings
    scoring = rehearsal.scoring
    lanes = [_lane(Side.TRAINER, Phase.SCORE, scoring, begin)] if scoring != NOTHING else []
    steps = settings.steps_per_iteration
    start = begin + _middle(scoring)
    of_step = _middle(rehearsal.step)
    for phase in (Phase.TRAIN, Phase.REDUCE, Phase.OPTIMIZE):
        each = rehearsal.phase_seconds(phase)
        if each != NOTHING:
            spans = tuple(Span(start + step * of_step, _middle(each)) for step in range(steps))
            lanes.append(Lane(Side.TRAINER, phase, each * steps, spans))
        start += _middle(each)
    return lanes


def _lane(side: Side, name: str, seconds: Seconds, start: float) -> Lane:
    return Lane(side, name, seconds, (Span(start, _middle(seconds)),))


def _waits(side: Side, seconds: Seconds, start: float, end: float) -> list[Lane]:
    """Return the lane of a side that waits from ``start`` to ``end``; none if it never waits."""
    if not seconds.high:
        return []
    return [Lane(side, WAITS, seconds, (Span(start, end - start),))]


def _beyond(longer: Seconds, other: Seconds) -> Seconds:
    """Return by how much ``longer`` may exceed ``other``."""
    return Seconds(max(0.0, longer.low - other.high), max(0.0, longer.high - other.low))


def _middle(seconds: Seconds) -> float:
    return (seconds.low + seconds.high) / 2
