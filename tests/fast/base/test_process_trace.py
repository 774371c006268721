"""Traces of processes: self times and idle times add up, and clocks of machines are aligned."""

import gzip
import json

from hypothesis import given
from hypothesis import strategies as st

from miles.base.profiling import (
    OPERATION,
    SPAN,
    Event,
    LoopPhases,
    ProcessTrace,
    Recorder,
    clock_name,
    clock_offset,
    from_kineto,
    idle_times,
    self_times,
    span,
    waiting,
)
from miles.run.iteration_profiler import IDLE, KINDS, PYTHON, kind_of, seconds_by_kind, table, write_trace


@st.composite
def nested(draw, depth=3):
    """Return events of one thread, as calls nest, in order."""
    events = []

    def fill(start, end, level):
        at = start
        while level and at < end and draw(st.booleans()):
            begin = draw(st.integers(at, end))
            stop = draw(st.integers(begin, end))
            events.append(Event(f"level {level}", OPERATION, "t", begin, stop - begin))
            fill(begin, stop, level - 1)
            at = stop

    fill(0, 1000, depth)
    return sorted(events, key=lambda event: (event.start, -event.duration))


@given(nested())
def test_self_times_add_up_to_the_time_that_something_ran(events):
    covered = set()
    for event in events:
        covered.update(range(event.start, event.end))
    own = list(self_times(events))
    assert len(own) == len(events)
    assert sum(nanoseconds for _, nanoseconds in own) == len(covered)
    trace = ProcessTrace("p", 0, 1000, events)
    gaps = [nanosecond for start, end in idle_times(trace, shortest=1) for nanosecond in range(start, end)]
    assert sorted([*gaps, *covered]) == list(range(1000))


def test_the_offset_of_another_clock_is_that_of_the_fastest_reading():
    ahead = 5_000_000
    slow = (0, 900_000 + ahead, 1_000_000)
    fast = (2_000_000, 2_000_040 + ahead, 2_000_100)
    offset = clock_offset([slow, fast])
    assert abs(offset - ahead) <= (fast[2] - fast[0]) / 2
    assert ProcessTrace("p", 10 + ahead, 20 + ahead).shifted(-ahead).start == 10


def test_the_shortest_operations_are_left_out_first_and_spans_stay():
    rows = [{"ph": "X", "cat": "cpu_op", "name": f"op {i}", "tid": 1, "pid": 1, "ts": i, "dur": i} for i in range(10)]
    rows += [{"ph": "X", "cat": "user_annotation", "name": "span", "tid": 1, "pid": 1, "ts": 0, "dur": 0.5}]
    events, dropped = from_kineto({"baseTimeNanoseconds": 7, "traceEvents": rows}, most=4)
    assert dropped == 7
    assert [event.name for event in events] == ["span", "op 7", "op 8", "op 9"]
    assert events[0].start == 7 and events[-1].start == 9007


def test_a_process_is_recorded_with_its_threads_operations_spans_and_waits(tmp_path):
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    import torch

    async def wait():
        with waiting("an answer"):
            await asyncio.sleep(0)

    with span("before"):
        pass
    recorder = Recorder("a process")
    assert recorder.stop() is None, "it was not started"
    recorder.start()
    with ThreadPoolExecutor(1) as pool:
        with span("outer"):
            product = torch.ones(8, 8) @ torch.ones(8, 8)

        def elsewhere():
            with span("elsewhere"):
                return product + 1

        pool.submit(elsewhere).result()
    asyncio.run(wait())
    trace = recorder.stop()
    assert trace is not None and trace.clock == clock_name()
    by_name = {event.name: event for event in trace.events}
    assert "before" not in by_name
    assert by_name["outer"].thread != by_name["elsewhere"].thread
    assert by_name["outer"].category == SPAN and "aten::mm" in by_name
    assert trace.start <= by_name["outer"].start <= by_name["elsewhere"].end <= trace.end
    assert [name for name, _, _ in trace.waits] == ["an answer"]
    assert sum(seconds_by_kind(trace.events)["matrix products"].values()) > 0

    write_trace(tmp_path / "trace.json.gz", [trace])
    written = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in written if event["ph"] == "M" and "name" in event["args"]}
    assert {"a process", IDLE} <= names
    spans = [event for event in written if event["ph"] == "X" and event["name"] == "outer"]
    assert len(spans) == 1 and spans[0]["ts"] >= 0
    assert {event["ph"] for event in written if event["name"] == "an answer"} == {"b", "e"}


def test_phases_of_the_loop_are_shown_one_at_a_time():
    now = iter([0, 10, 30, 40, 60, 70, 100])
    phases = LoopPhases(clock=lambda: next(now))
    phases.begin()
    for name in ("save", "export", "save", None):
        phases.phase(name)
    trace = phases.end("clock")
    assert [(event.name, event.start, event.duration) for event in trace.events] == [
        ("save", 10, 20),
        ("export", 30, 10),
        ("save", 40, 20),
    ]
    assert (trace.start, trace.end) == (0, 100)


def test_kinds_of_operations():
    def kind(name, category=OPERATION):
        return kind_of(Event(name, category, "t", 0, 1))

    expected = {
        "aten::mm": "matrix products",
        "aten::mkldnn_linear": "matrix products",
        "mkldnn::_linear_pointwise": "matrix products",
        "mkldnn::_reorder_linear_weight": "copies and casts",
        "_CachedAttention": "attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "_c10d_functional::wait_tensor": "communication",
        "c10d::_allgather_base_": "communication",
        "aten::copy_": "copies and casts",
        "aten::mul": "elementwise",
        "aten::silu_backward": "elementwise",
        "aten::logsumexp": "reductions",
        "aten::_softmax_backward_data": "reductions",
        "aten::index_add_": "indexing",
        "aten::zero_": "filling",
        "aten::_fused_adamw_": "optimizer",
        "aten::empty_strided": "shapes and memory",
        "autograd::engine::evaluate_function: MmBackward0": PYTHON,
    }
    assert {name: kind(name) for name in expected} == expected
    assert kind("train", SPAN) == PYTHON
    assert kind("gloo:all_reduce", SPAN) == "communication"
    assert kind("sm90_xmma_gemm_bf16", "kernel") == "matrix products"
    assert set(expected.values()) <= set(KINDS)


def test_the_table_names_phases_kinds_spans_and_idle_time():
    loop = ProcessTrace("main loop", 0, 10**9, [Event("generate", SPAN, "main", 0, 4 * 10**8)])
    events = [Event("micro-batch 3: forward", SPAN, "t", 0, 5 * 10**8), Event("aten::mm", OPERATION, "t", 0, 3 * 10**8)]
    lines = table(loop, [ProcessTrace("trainer rank 0", 0, 10**9, events, dropped=1200)], 3).splitlines()
    words = [line.split("  ")[1].strip() for line in lines if line.startswith("  ")]
    assert lines[0] == "iteration 3: 1.000 s"
    assert words == [
        "between phases",
        "generate",
        "matrix products",
        "python, between operations",
        "idle",
        "micro-batch: forward",
        "1,200 events and waits are left out, as there were too many",
    ]
    (products,) = [line for line in lines if "matrix products" in line]
    assert products.split() == ["matrix", "products", "0.300", "s", "30.0", "%", "mm", "0.300"]
