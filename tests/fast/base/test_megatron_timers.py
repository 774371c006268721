"""Megatron's timers name its work in a profile, and are absent otherwise."""

from types import SimpleNamespace

from miles.base.profiling import SPAN, Recorder, named_by_timers


def test_timers_are_spans_while_a_profile_is_recorded():
    config = SimpleNamespace(timers=None)
    with named_by_timers(config):
        assert config.timers is None, "nothing is recorded"
    recorder = Recorder("rank")
    recorder.start()
    with named_by_timers(config):
        config.timers("forward-backward", log_level=1).start(barrier=True)
        for name in ("forward-compute", "backward-compute"):
            config.timers(name, log_level=2).start()
            config.timers(name).stop()
        config.timers("forward-backward").stop()
    assert config.timers is None
    trace = recorder.stop()
    spans = {event.name: event for event in trace.events if event.category == SPAN}
    assert list(spans) == ["forward-backward", "forward-compute", "backward-compute"]
    outer, forward, backward = spans.values()
    assert outer.start <= forward.start <= forward.end <= backward.start <= backward.end <= outer.end
