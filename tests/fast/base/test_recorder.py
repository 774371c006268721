"""A recorder of spans and waits alone."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from miles.base.profiling import Recorder
from miles.base.profiling import span, waiting

recorder = Recorder("worker", operations=False)
assert recorder.stop() is None
for _ in range(2):
    recorder.start()
    recorder.start()
    with span("outer"), waiting("wait"), span("inner"):
        pass
    trace = recorder.stop()
    assert [event.name for event in trace.events] == ["outer", "inner"], trace
    outer, inner = trace.events
    assert trace.start <= outer.start <= inner.start <= inner.end <= outer.end <= trace.end
    assert [name for name, _, _ in trace.waits] == ["wait"] and trace.dropped == 0
with span("later"):
    pass
assert recorder.stop() is None
assert "torch" not in sys.modules
"""


def test_spans_and_waits_are_recorded_without_torch():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
