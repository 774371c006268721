"""Which iterations a profiler cannot record any more when a run resumes."""

import pytest

from miles.base.profiling import LoopPhases, clock_name
from miles.config.profiling import ProfilingArguments
from miles.run.iteration_profiler import IterationProfiler


def begun_at(folder, first, **fields):
    """Enter the first iteration of a process; it records none of them itself."""
    profiling = ProfilingArguments(**fields)
    assert first not in profiling.iterations
    profiler = IterationProfiler(profiling, str(folder), trainer=None, rollout=None, workers=None)
    for number in (first, first + 1):
        with profiler.iteration(number):
            pass


@pytest.mark.parametrize(
    ("fields", "first", "note"),
    [
        ({}, 2, "the run continues with iteration 2, so iteration 1 cannot be recorded; give --profile-step-start 2"),
        ({"profile_step_start": 2, "profile_step_end": 5}, 7, "iteration 7, so iterations 2 to 4 cannot be recorded"),
    ],
)
def test_a_run_that_resumes_after_the_iterations_to_record_says_so_once(tmp_path, capsys, fields, first, note):
    begun_at(tmp_path, first, profile=True, **fields)
    out = capsys.readouterr().out
    assert note in out and out.count("note: --profile: ") == 1


def test_what_an_earlier_attempt_has_recorded_is_not_missed(tmp_path, capsys):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "iteration_1.json.gz").touch()
    begun_at(tmp_path, 2, profile=True)
    assert capsys.readouterr().out == ""


def test_nothing_is_missed_before_those_iterations_or_without_the_flag(tmp_path, capsys):
    begun_at(tmp_path, 0, profile=True, profile_step_start=3)
    begun_at(tmp_path, 2)
    assert capsys.readouterr().out == ""


def test_a_full_disk_is_a_note_and_leaves_no_half_trace(tmp_path, capsys):
    trace = tmp_path / "profile" / "iteration_1.json.gz"
    trace.parent.mkdir()
    trace.symlink_to("/dev/full")
    profiler = IterationProfiler(ProfilingArguments(profile=True), str(tmp_path), None, None, None)
    loop = LoopPhases()
    loop.begin()
    profiler._write(1, loop.end(clock_name()), [])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: --profile: {trace} was not written, because the disk ") and line.endswith("is full")
    assert list(trace.parent.iterdir()) == []
