"""The timeline of an iteration shows the seconds of the report, one after the other or alongside each other."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rehearsed_layouts import FSDP, save_models

from miles.commands.rehearsal.meter import Phase
from miles.commands.rehearsal.rehearsal import Rehearsal, rehearse_settings
from miles.commands.rehearsal.report import WAITS, Lane, Side, Timeline, as_json, as_page, as_text, timeline_of
from miles.commands.rehearsal.roofline import Seconds, sync_seconds
from miles.commands.rehearsal.trace import Tracers
from miles.config.validate import validate


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """Rehearse a step whose samples are scored by a reference."""
    folder = tmp_path_factory.mktemp("models")
    save_models(folder, weights=False)
    return rehearse_settings(validate(FSDP["fsdp, 2 ranks, reference"].settings(folder)).settings, Tracers())


def with_flags(rehearsal: Rehearsal, async_steps: int = 0, batches: int = 1, epochs: int = 1) -> Rehearsal:
    """Return ``rehearsal`` with prompts for so many steps, as many passes over them, and generation ahead."""
    settings = rehearsal.settings
    rollout = replace(settings.rollout, async_steps=async_steps, rollout_batch_size=4 * batches)
    training = replace(settings.training, ppo_epochs=epochs)
    return replace(rehearsal, settings=replace(settings, rollout=rollout, training=training))


def with_generation(rehearsal: Rehearsal, low: float, high: float) -> Rehearsal:
    """Return ``rehearsal`` with engines that take ``low`` to ``high`` times as long as the trainer."""
    training = rehearsal.training
    duration = Seconds(training.low * low, training.high * high)
    return replace(rehearsal, generation=replace(rehearsal.generation, duration=duration))


def timeline_for(rehearsal: Rehearsal) -> Timeline:
    timeline = timeline_of(rehearsal)
    assert timeline is not None
    return timeline


def lanes_of(timeline: Timeline, side: Side) -> dict[str, Lane]:
    return {lane.name: lane for lane in timeline.lanes if lane.side == side}


def summed(lanes: list[Lane]) -> Seconds:
    return sum((lane.seconds for lane in lanes), Seconds(0.0, 0.0))


def middle(seconds: Seconds) -> float:
    return (seconds.low + seconds.high) / 2


def near(seconds: Seconds) -> object:
    return pytest.approx((seconds.low, seconds.high))


@pytest.mark.parametrize(("batches", "epochs"), [(1, 1), (3, 1), (2, 2)])
def test_the_trainers_lanes_add_up_to_the_seconds_of_the_report(rehearsal, batches, epochs):
    variant = with_flags(rehearsal, batches=batches, epochs=epochs)
    lanes = lanes_of(timeline_for(variant), Side.TRAINER)
    assert [*lanes] == [WAITS, Phase.SCORE, Phase.TRAIN, Phase.OPTIMIZE], "FSDP reduces gradients in the passes"
    of_steps = summed([lanes[phase] for phase in (Phase.TRAIN, Phase.OPTIMIZE)])
    assert (of_steps.low, of_steps.high) == near(variant.step * (batches * epochs))
    scored = lanes[Phase.SCORE].seconds
    assert (scored.low, scored.high) == near(variant.phase_seconds(Phase.SCORE) * batches), "once for all passes"
    whole = of_steps + scored
    assert (whole.low, whole.high) == near(variant.training)
    for name, lane in lanes.items():
        assert sum(span.length for span in lane.spans) == pytest.approx(middle(lane.seconds))
        assert len(lane.spans) == (1 if name in (WAITS, Phase.SCORE) else batches * epochs)


def test_sides_take_turns(rehearsal):
    timeline = timeline_for(rehearsal)
    generation, training, sync = rehearsal.generation.duration, rehearsal.training, rehearsal.sync
    assert not timeline.overlaps
    assert (timeline.seconds.low, timeline.seconds.high) == near(generation + training + sync)
    rollout, trainer = lanes_of(timeline, Side.ROLLOUT), lanes_of(timeline, Side.TRAINER)
    assert rollout[WAITS].seconds == training and trainer[WAITS].seconds == generation
    everything = sorted(
        span for lanes in (rollout, trainer) for n, lane in lanes.items() if n != WAITS for span in lane.spans
    )
    everything += lanes_of(timeline, Side.BOTH)[Phase.SYNC].spans
    end = 0.0
    for start, length in everything:
        assert start == pytest.approx(end), "nothing overlaps, and nobody idles"
        end = start + length
    assert end == pytest.approx(middle(timeline.seconds))


@pytest.mark.parametrize(("low", "high", "waits"), [(0.01, 0.02, "rollout"), (100.0, 200.0, "trainer")])
def test_ahead_both_sides_begin_at_once_and_the_faster_waits(rehearsal, low, high, waits):
    variant = with_generation(with_flags(rehearsal, async_steps=1), low, high)
    timeline = timeline_for(variant)
    generation, training = variant.generation.duration, variant.training
    slower, faster = (training, generation) if waits == "rollout" else (generation, training)
    assert timeline.overlaps
    assert (timeline.seconds.low, timeline.seconds.high) == near(slower + variant.sync)
    (waiting,) = [lane for lane in timeline.lanes if lane.name == WAITS and lane.spans[0].length]
    assert waiting.side == waits
    assert waiting.seconds.high == pytest.approx(slower.high - faster.low)
    (span,) = waiting.spans
    assert span.start == pytest.approx(middle(faster)) and span.length == pytest.approx(middle(slower) - middle(faster))
    starts = [
        lanes_of(timeline, side)[name].spans[0].start
        for side, name in ((Side.ROLLOUT, Phase.GENERATE), (Side.TRAINER, Phase.SCORE))
    ]
    assert starts == [0.0, 0.0]
    (update,) = lanes_of(timeline, Side.BOTH)[Phase.SYNC].spans
    assert update.start == pytest.approx(middle(slower)), "both wait for the slower side before the engines get weights"


def test_whoever_may_wait_is_named_if_the_ranges_overlap(rehearsal):
    timeline = timeline_for(with_generation(with_flags(rehearsal, async_steps=1), 1.0, 1.0))
    assert [(lane.side, lane.seconds.low) for lane in timeline.lanes if lane.name == WAITS] == [
        ("rollout", 0),
        ("trainer", 0),
    ]


def test_nothing_is_drawn_of_engines_that_cannot_generate(rehearsal):
    variant = replace(
        rehearsal, generation=replace(rehearsal.generation, sequences=0, duration=Seconds(float("inf"), float("inf")))
    )
    assert timeline_of(variant) is None
    assert as_json(variant, [], 1.0)["iteration"] is None
    assert "iteration  " not in as_text(variant, [], 1.0)
    assert "the engines have no room to generate" in as_page(variant, [], 1.0)


def test_a_run_without_engines_has_a_trainer_only(rehearsal):
    none = replace(rehearsal.generation, engines=0, duration=Seconds(0.0, 0.0))
    variant = replace(rehearsal, generation=none)
    timeline = timeline_for(variant)
    assert {lane.side for lane in timeline.lanes} == {Side.TRAINER} and WAITS not in lanes_of(timeline, Side.TRAINER)
    assert timeline.seconds == variant.training


@pytest.mark.parametrize("async_steps", [0, 2])
def test_the_picture_has_the_bars_and_labels_of_the_lanes(rehearsal, async_steps):
    variant = with_flags(rehearsal, async_steps=async_steps, batches=2)
    timeline = timeline_for(variant)
    page = as_page(variant, [], 1.0)
    picture = page[page.index("Timeline of an iteration") :].split("</svg>")[0]
    rect = re.compile(r"<rect x=([\d.]+) y=(\d+) width=([\d.]+) .*?<title>(\w+), ([\w ]+): (.*?)</title>")
    bars = [(match[4], match[5], float(match[1]), float(match[3])) for match in rect.finditer(picture)]
    expected = [(lane.side, lane.name, *span) for lane in timeline.lanes for span in lane.spans]
    assert [bar[:2] for bar in bars] == [span[:2] for span in expected]
    scale = max(x + width for _, _, x, width in bars) - bars[0][2]
    scale /= max(start + length for _, _, start, length in expected)
    for bar, span in zip(bars, expected, strict=True):
        assert bar[3] == pytest.approx(span[3] * scale, abs=0.02)
        assert bar[2] == pytest.approx(bars[0][2] + span[2] * scale, abs=0.02)
    for lane in timeline.lanes:
        assert f">{lane.name}</text>" in picture and f">{lane.seconds}</text>" in picture
    assert "color-scheme:light dark" in page and "svg text{fill:currentColor}" in page
    assert ("Generation runs alongside training" in picture) == (async_steps > 0)


def test_the_report_says_who_waits_and_the_json_has_the_lanes(rehearsal):
    timeline = timeline_for(rehearsal)
    text = as_text(rehearsal, [], 1.0)
    assert f"iteration    {timeline.seconds}, generation before training\n" in text
    assert f"the rollout side waits {rehearsal.training}" in text
    assert "generation alongside training\n" in as_text(with_flags(rehearsal, 1), [], 1.0)
    figures = json.loads(json.dumps(as_json(rehearsal, [], 1.0)))
    assert figures["weight_sync_seconds"] == [rehearsal.sync.low, rehearsal.sync.high]
    assert figures["iteration"]["seconds"] == [timeline.seconds.low, timeline.seconds.high]
    assert [lane["name"] for lane in figures["iteration"]["lanes"]] == [lane.name for lane in timeline.lanes]
    assert figures["iteration"]["lanes"][0]["drawn"] == [[0.0, middle(rehearsal.generation.duration)]]


def test_all_weights_reach_each_engine_of_a_broadcast_and_files_take_an_unknown_time(rehearsal):
    settings, device = rehearsal.settings, replace(rehearsal.device, network=4)
    assert sync_seconds(settings, 10**9, 1, device) == Seconds(2.0, 2.0 / 0.6)  # fp32, to the host and from it
    servers = replace(settings, rollout=replace(settings.rollout, rollout_engine="sglang"))
    times = {}
    for mode in ("broadcast", "ipc", "disk", "disk-delta"):
        each = replace(servers, sglang=replace(servers.sglang, update_weight_transfer_mode=mode))
        seconds = sync_seconds(each, 10**9, 3, device)
        times[mode] = None if seconds is None else seconds.low
    assert times == {"broadcast": 4.0, "ipc": 2.0, "disk": None, "disk-delta": None}
    files = replace(
        rehearsal, settings=replace(settings, sglang=replace(settings.sglang, update_weight_transfer_mode="disk-delta"))
    )
    assert rehearsal.sync is not None and files.sync is None
    assert not lanes_of(timeline_for(files), Side.BOTH)
    assert "weight sync  not known" in as_text(files, [], 1.0)
    assert "The time of weight sync is not known." in as_page(files, [], 1.0)
    assert as_json(files, [], 1.0)["weight_sync_seconds"] is None
