"""The flags of a profile: which iterations and ranks are recorded."""

import pytest

from miles.config.explain import explain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--profile --profile-step-start 10", "--profile-step-start 10: the run has 10 iterations"),
        ("--profile --profile-step-start -1", "--profile-step-start -1: must be a finite number of at least 0"),
        ("--profile --profile-step-start 3 --profile-step-end 3", "--profile-step-end 3: must be above"),
        ("--profile --profile-step-end 11", "--profile-step-end 11: the run has 10 iterations, counted from 0"),
        ("--profile --actor-num-gpus-per-node 2 --profile-ranks 0 2", "--profile-ranks 2: the run has 2 trainer ranks"),
    ],
)
def test_what_does_not_exist_is_refused(refused, flags, message):
    (error,) = refused(flags)
    assert error.startswith(message), error


@pytest.mark.parametrize(
    ("flags", "iterations"),
    [
        ("", []),
        ("--profile", [1]),
        ("--use-pytorch-profiler --profile-step-start 2 --profile-step-end 5", [2, 3, 4]),
        ("--profile --profile-step-start 0", [0]),
    ],
)
def test_iterations_that_are_recorded(validated, flags, iterations):
    assert list(validated(flags).settings.profiling.iterations) == iterations


def test_ranks_that_are_recorded(validated):
    assert validated("--profile --profile-ranks 0").settings.profiling.ranks(4) == (0,)
    assert validated("--profile").settings.profiling.ranks(4) == (0, 1, 2, 3)
    assert len(validated("--profile").settings.profiling.ranks(4096)) == 8


def test_a_script_may_name_iterations_that_nobody_records(validated):
    text = explain(validated("--profile-step-start 100 --profile-step-end 102"))
    assert "--profile-step-start 100, --profile-step-end 102: without --profile" in text
    assert "outputs/run/profile: a trace and a table of iteration 1" in explain(validated("--profile"))
