"""Whole sweeps of tiny runs: finished runs stay, interrupted ones resume, failed ones are tried twice and told."""

import json
import re
import shlex
import signal

import pytest
from sweep_files import planned, write_run_of, write_sweep
from tolerance import RUN_ERROR, RUN_METRIC_ERROR

from miles.commands import sweep as sweep_command
from miles.commands.saved_runs.run import RunState, SavedRun
from miles.observe.metrics_file import MetricsFile

pytestmark = pytest.mark.timeout(900)


def metrics(folder):
    """Return the rows of a run without what depends on the machine, and the canary, which a resumed run has again."""
    file = MetricsFile(folder / "metrics.jsonl")
    file.refresh()
    names = [
        name
        for name in file.names
        if not name.startswith(("time/", "perf/", "weight_sync/", "memory/", "train/loss_mass"))
    ]
    return list(file.steps), {name: list(map(repr, file.column(name))) for name in names}


@pytest.mark.parametrize("how", [["--one-process"], pytest.param([], marks=pytest.mark.slow)], ids=["forks", "ray"])
def test_two_variants_run_once_and_are_compared(sweep, tmp_path, how):
    two = {"variants": {"base": {"num_rollout": 1}, "faster": {"num_rollout": 1, "lr": "1e-2"}}, "seeds": [3]}
    first = sweep(two, "--jobs", 2, *how)
    assert first.wait() == 0, first.out + first.err
    assert "sweep: 2 runs (2 variants × 1 seed), 0 finished before; 2 at once" in first.out
    out = tmp_path / "out"
    runs = {name: SavedRun(out / name / "seed-3") for name in ("base", "faster")}
    for run in runs.values():
        assert run.state is RunState.FINISHED
        assert (run.settings.training.seed, run.settings.data.rollout_seed) == (3, 3)
    assert (runs["base"].settings.optimizer.lr, runs["faster"].settings.optimizer.lr) == (1e-3, 1e-2)
    assert metrics(out / "base" / "seed-3") != metrics(out / "faster" / "seed-3")
    table = json.loads((out / "table.json").read_text())
    assert table["settings"]["optimizer.lr"] == {"base": "0.001", "faster": "0.01"}
    assert "rollout/reward" in {row["metric"] for row in table["rows"]}
    assert (out / "sweep.html").exists() and first.none_left()
    again = sweep(two, "--jobs", 2, *how)
    assert again.wait() == 0 and "2 finished before\n" in again.out, again.out + again.err
    assert [len(json.loads((run.folder / "sweep-run.json").read_text())["attempts"]) for run in runs.values()] == [1, 1]


@pytest.mark.slow
def test_runs_in_one_process_are_those_with_ray(sweep, tmp_path):
    """With generation ahead of training, whose weights are loaded later; one of the forks fails, and is reported."""
    ahead = {"num_rollout": 3, "async_steps": 1}
    variants = {"ahead": ahead, "bad": {"num_rollout": 1, "custom_rm_path": "launch_rewards:raises"}}
    forked = sweep({"variants": variants, "seeds": [2]}, "--jobs", 1, "--one-process")
    assert forked.wait() == 1, forked.out + forked.err
    assert "[1/2] ahead seed 2: finished in" in forked.out and "1 run failed:" in forked.err, forked.out + forked.err
    assert "gold" in (tmp_path / "out" / "bad" / "seed-2" / "log.txt").read_text()
    steps, columns = metrics(tmp_path / "out" / "ahead" / "seed-2")
    (tmp_path / "out" / "ahead").rename(tmp_path / "forked")
    with_ray = sweep({"variants": {"ahead": ahead}, "seeds": [2]})
    assert with_ray.wait() == 0, with_ray.out + with_ray.err
    expected_steps, expected = metrics(tmp_path / "out" / "ahead" / "seed-2")
    assert steps == expected_steps and columns.keys() == expected.keys()
    for name, values in columns.items():  # with other numbers of threads, so up to the order of sums
        assert list(map(float, values)) == pytest.approx(
            list(map(float, expected[name])), rel=RUN_ERROR, abs=RUN_METRIC_ERROR, nan_ok=True
        ), name
    assert forked.none_left() and with_ray.none_left()


@pytest.mark.parametrize("words", [[], ["--page-only"], ["--explain"]], ids=["queue", "page", "explain"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n'),
        ("sweep-run.json", "{"),
        ("sweep-run.json", '{"variant": "run", "seed": 1, "words": [], "attempts": [{"of": "another version"}]}'),
    ],
    ids=["metrics", "half a record", "record of another version"],
)
def test_a_damaged_file_of_a_run_is_named(tmp_path, capsys, words, name, text):
    _, runs = planned(tmp_path, seeds=2)
    path = [write_run_of(run) for run in runs][0].folder / name
    path.write_text(text)
    status = sweep_command.main([str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"), *words])
    told = capsys.readouterr()
    assert status == (0 if words == ["--explain"] else 2)
    assert f"{path}:" in (told.out if words == ["--explain"] else told.err)


@pytest.mark.parametrize("words", [[], ["--page-only"]], ids=["queue", "page"])
def test_what_cannot_be_written_is_told_in_one_sentence(tmp_path, capsys, words):
    """In a thread of the queue, and in the comparison at the end.

    A link to nothing, and a folder instead of a file, stand for a full disk.
    """
    file, out = write_sweep(tmp_path), tmp_path / "out"
    out.mkdir()
    blocked = out / "table.json" if words else out / "run"
    blocked.mkdir() if words else blocked.symlink_to(tmp_path / "missing")
    command = [str(file), "--out", str(out), *words]
    assert sweep_command.main(command) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"miles sweep: error: --out {out}: cannot continue (") and told.count("\n") == 1
    assert str(blocked) in told and f"miles sweep {shlex.join(command)} continues" in told


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_to_the_same_result(sweep, tmp_path, workplace):
    """A run is stopped during generation: it saves, the sweep prints the way on, and its metrics are as without."""
    definition = {"variants": {"a": {}, "b": {"lr": "1e-4"}}, "seeds": [1]}
    saving = {
        **definition,
        "variants": {name: {**v, "save": "x", "num_rollout": 4} for name, v in definition["variants"].items()},
    }
    held = workplace / f"{tmp_path.name}.held"
    first = sweep(saving, "--jobs", 1, HOLD_AT="2", HELD=str(held))
    first.wait_until(held.exists)
    first.interrupt()
    assert first.wait() == 128 + signal.SIGINT, first.out + first.err
    assert "SIGINT: stopping; waiting for 1 run" in first.out
    assert re.search(r"2 runs are not finished; miles sweep \S*sweep.yaml .* continues", first.err)
    assert first.none_left() and not (tmp_path / "out" / "b").exists()
    second = sweep(saving, "--jobs", 1)
    assert second.wait() == 0, second.out + second.err
    assert "a seed 1 resumes after iteration 2" in second.out
    interrupted = metrics(tmp_path / "out" / "a" / "seed-1")
    whole = sweep({**saving, "variants": {"whole": saving["variants"]["a"]}})
    assert whole.wait() == 0
    assert interrupted == metrics(tmp_path / "out" / "whole" / "seed-1")


@pytest.mark.slow
def test_a_run_that_fails_twice_is_told_and_the_others_are_compared(sweep, tmp_path):
    bad = {"num_rollout": 2, "custom_rm_path": "launch_rewards:raises"}
    definition = {"variants": {"bad": bad, "good": {"num_rollout": 1}}, "seeds": [1], "baseline": "good"}
    run = sweep(definition, "--jobs", 1, FAIL_AT="1")
    assert run.wait() == 1, run.out + run.err
    lines = run.out.splitlines()
    assert sum("bad seed 1: failed with status 1" in line and "trying once more" in line for line in lines) == 1
    assert "[1/2] good seed 1: finished in" in run.out
    assert "1 run failed:" in run.err and "the reward function failed" in run.err and "log.txt" in run.err
    log = (tmp_path / "out" / "bad" / "seed-1" / "log.txt").read_text()
    assert len(re.findall("^--- ", log, re.MULTILINE)) == 2 and "gold" in log
    assert json.loads((tmp_path / "out" / "table.json").read_text())["runs"][1]["is_finished"]
