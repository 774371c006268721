"""``--save-best``: the best checkpoint is recorded, kept with the others, and removed for a complete better one."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config.checkpoint import CheckpointArguments
from miles.config.model import ModelArguments
from miles.run.best_checkpoint import FILE_NAME, BestCheckpoint, BestSoFar, best_in, remove_superseded
from miles.training.checkpoint_files import all_in, publish, staging
from miles.types.metrics import Metric

METRIC = "eval/heldout/accuracy"


def run(root, values, interval=None, mode="max", metric=METRIC, after=0, **flags):
    """Save as the loop and the driver do: one value of the metric per iteration; None: it was not measured.

    The run resumes after so many iterations.
    """
    made = SimpleNamespace(
        checkpoint=CheckpointArguments(save=str(root), save_best=f"{metric}:{mode}", **flags), model=ModelArguments()
    )
    so_far = BestSoFar(f"{metric}:{mode}", root, after)
    for done, value in enumerate(values, after + 1):
        due = done == after + len(values) or (interval is not None and done % interval == 0)
        metrics = {} if value is None else {metric: Metric(2 * value, 2.0)}
        best = so_far.improved_by(metrics, done, due)
        if due or best is not None:
            (staging(root, done) / "weights").write_text("whole")
            remove_superseded(publish(root, done), made, best)
    return so_far


def left(root):
    return [int(folder.name.removeprefix("iter_")) for folder in all_in(root)]


def test_the_best_is_kept_beside_those_that_are_due(tmp_path):
    run(tmp_path, [0.1, 0.5, 0.9, 0.4, 0.2, 0.3], interval=2)
    assert left(tmp_path) == [2, 3, 4, 6], "1 was the best for a while only"
    assert best_in(tmp_path) == BestCheckpoint(METRIC, "max", 0.9, 3, False)


def test_pruning_never_removes_it(tmp_path):
    run(tmp_path, [0.1, 0.9, 0.2, 0.3, 0.2, 0.1], interval=1, save_keep_last=1)
    assert left(tmp_path) == [2, 6]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"save_retain_interval": 4, "save_keep_last": 3}, [4, 5, 7, 9]),
        ({"save_retain_interval": 4}, [4, 7, 9]),
        ({"save_keep_last": 3}, [5, 7, 9]),
        ({"save_keep_last": 1}, [7, 9]),
    ],
)
def test_one_that_was_the_best_stays_if_the_flags_keep_it(tmp_path, flags, expected):
    run(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5, None, 0.7, None, None], **flags)
    assert best_in(tmp_path).iterations == 7
    assert left(tmp_path) == expected


@pytest.mark.parametrize(("metric", "mode"), [("rollout/reward", "max"), (METRIC, "min")])
def test_the_best_by_another_metric_stays(tmp_path, capsys, metric, mode):
    run(tmp_path, [0.1, 0.9, 0.2, 0.3])
    assert left(tmp_path) == [2, 4]
    run(tmp_path, [0.03, 0.02, 0.01], metric=metric, mode=mode, after=4)
    better = {"max": 5, "min": 7}[mode]
    assert best_in(tmp_path).iterations == better
    assert left(tmp_path) == sorted({2, 4, better, 7})
    out = capsys.readouterr().out
    assert f"note: --save-best {metric}:{mode}: best.json now names iter_0000005" in out
    assert out.count(f"iter_0000002, the best by {METRIC}:max, stays\n") == 1


def test_the_best_by_another_metric_goes_only_by_the_flags(tmp_path, capsys):
    run(tmp_path, [0.1, 0.9, 0.2], save_keep_last=1)
    run(tmp_path, [0.03], metric="rollout/reward", after=3, save_keep_last=1)
    assert left(tmp_path) == [2, 4]
    assert "stays until --save-keep-last and --save-retain-interval remove it" in capsys.readouterr().out
    run(tmp_path, [0.02], metric="rollout/reward", after=4, save_keep_last=1)
    assert left(tmp_path) == [4, 5]


def test_the_smallest_is_the_best_if_that_is_asked_for(tmp_path):
    run(tmp_path, [3.0, 1.0, 2.0], mode="min")
    assert best_in(tmp_path).iterations == 2 and left(tmp_path) == [2, 3]


def test_pruning_never_removes_a_checkpoint_whose_reference_is_read(tmp_path):
    for done in (1, 2, 3):
        reference = staging(tmp_path, done) / "reference"
        reference.mkdir()
        (reference / "state.json").write_text("{}")
        saved = publish(tmp_path, done)
        model = ModelArguments(ref_load=str(tmp_path / "iter_0000001" / "reference"))
        checkpoint = CheckpointArguments(save=str(tmp_path), save_keep_last=1)
        remove_superseded(saved, SimpleNamespace(checkpoint=checkpoint, model=model), None)
    assert left(tmp_path) == [1, 3]


@settings(max_examples=12)
@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), min_size=1, max_size=8), st.sampled_from(["max", "min"])
)
def test_no_value_is_better_than_the_best(tmp_path_factory, values, mode):
    root = tmp_path_factory.mktemp("best")
    so_far = run(root, values, mode=mode, save_keep_last=1)
    finite = [value for value in values if value is not None and math.isfinite(2 * value)]
    best = best_in(root)
    assert so_far.seen == any(value is not None for value in values)
    if not finite:
        assert best is None and left(root) == [len(values)]
    else:
        wanted = {"max": max, "min": min}[mode](finite)
        assert best.value == wanted and values.index(wanted) + 1 == best.iterations, "the first of equal ones"
        assert sorted({best.iterations, len(values)}) == left(root)


def test_a_resumed_run_continues_with_the_best_of_before(tmp_path):
    run(tmp_path, [0.9, 0.1])
    resumed = BestSoFar(METRIC, tmp_path, done=2)
    assert resumed.improved_by({METRIC: Metric(0.5)}, 3, False) is None
    assert resumed.improved_by({METRIC: Metric(0.95)}, 4, False).iterations == 4


@pytest.mark.parametrize(("spec", "done"), [(METRIC, 0), (f"{METRIC}:min", 2), ("rollout/reward", 2)])
def test_a_best_of_later_iterations_or_by_another_metric_does_not_count(tmp_path, spec, done):
    run(tmp_path, [0.9, 0.1])
    assert BestSoFar(spec, tmp_path, done).best is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"metric": 3}'])
def test_a_damaged_note_names_nothing(tmp_path, text):
    run(tmp_path, [0.9])
    assert best_in(tmp_path) is not None
    (tmp_path / FILE_NAME).write_text(text)
    assert best_in(tmp_path) is None


def test_a_note_of_a_checkpoint_that_is_gone_names_nothing(tmp_path):
    run(tmp_path, [0.9])
    replace(best_in(tmp_path), iterations=7).save(tmp_path)
    assert best_in(tmp_path) is None
