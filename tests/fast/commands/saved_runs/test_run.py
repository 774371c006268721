"""A run's folder states what state it is in and which checkpoints it has, and ``miles runs`` shows it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from miles.base.locks import locked_folders
from miles.base.text import InputError
from miles.commands import runs
from miles.commands.saved_runs.run import RunState, SavedRun, runs_below, settings_from_json
from miles.config.parser import parse
from miles.config.validate import validate
from miles.observe.run_files import RunFiles, RunHeader
from miles.observe.tracker import Tracker
from miles.run.best_checkpoint import BestCheckpoint
from miles.training.checkpoint_files import publish, staging

REPO = Path(__file__).parents[4]
TWO_STEPS = "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4 --rollout-stop-token-ids 1 2"


def settings_of(folder, more=""):
    flags = f"--hf-checkpoint some/model --prompt-data hf:some/data --rm-type length --num-rollout 5 {TWO_STEPS}"
    flags += f" --rollout-max-response-len 8 --output-dir {folder} --save {folder}/checkpoints {more}"
    return validate(parse(flags.split())).settings


def write_run(folder, iterations, saved=(), more=""):
    """Write a run of 5 iterations, of two optimizer steps each, that has done some."""
    folder.mkdir(parents=True)
    settings = settings_of(folder, more)
    RunHeader.from_sections("miles", settings, "words", "formula", 10).save(folder)
    for step in range(1, 2 * iterations + 1):
        RunFiles(folder).append_metrics(step, {"rollout/reward": step / 10})
    for iteration in saved:
        (staging(folder / "checkpoints", iteration) / "weights").write_text("whole")
        publish(folder / "checkpoints", iteration)
    return settings


def test_settings_come_back_as_they_were(tmp_path):
    settings = write_run(tmp_path / "a", 0, more="--sglang-context-length 64 --rollout-engine sglang")
    assert SavedRun(tmp_path / "a").settings == settings
    header = dataclasses.asdict(SavedRun(tmp_path / "a").header)["settings"]
    with pytest.raises(InputError, match=r"run.json: unknown settings \(loss.newer\)"):
        settings_from_json(header | {"loss": {"newer": 1}}, "run.json")
    RunHeader("miles", {"rollout": {}}, "", "", 1).save(tmp_path / "a")
    with pytest.raises(InputError, match="run.json: lacks the settings of a run"):
        SavedRun(tmp_path / "a").settings  # noqa: B018


def test_states(tmp_path):
    write_run(tmp_path / "done", 5, saved=(2, 5))
    write_run(tmp_path / "ended", 3, saved=(2,))
    write_run(tmp_path / "unsaved", 5, saved=(2,))
    assert [SavedRun(tmp_path / n).state for n in ("done", "ended", "unsaved")] == ["finished", "failed", "failed"]
    with locked_folders([("--output-dir", tmp_path / "ended")]):
        assert SavedRun(tmp_path / "ended").state is RunState.RUNNING
    (tmp_path / "ended" / ".miles-lock").write_text(
        json.dumps({"host": os.uname().nodename, "pid": 2**22 + 1, "started": ""})
    )
    assert SavedRun(tmp_path / "ended").state is RunState.FAILED, "its launcher was killed"
    RunFiles(tmp_path / "ended").mark_end("stopped", "Ctrl-C")
    assert SavedRun(tmp_path / "ended").state is RunState.STOPPED


def test_a_run_without_prompts_has_finished_early_until_it_goes_on(tmp_path):
    settings = write_run(tmp_path / "a", 3, saved=(2,))
    RunFiles(tmp_path / "a").mark_ended_early(6)
    assert SavedRun(tmp_path / "a").state is RunState.FAILED, "its last checkpoint is missing"
    (staging(tmp_path / "a" / "checkpoints", 3) / "weights").write_text("whole")
    publish(tmp_path / "a" / "checkpoints", 3)
    assert SavedRun(tmp_path / "a").state is RunState.FINISHED
    header = RunHeader.from_sections("miles", settings, "words", "formula", 10)
    with Tracker(settings.tracking, header) as tracker:
        tracker.resume(7)
    assert SavedRun(tmp_path / "a").state is RunState.FAILED, "a resumed run has its steps before it"
    with Tracker(settings.tracking, header) as tracker:
        tracker.resume(5)
        tracker.log(5, {"rollout/reward": 0.5})
        tracker.log(6, {"rollout/reward": 0.5})
        tracker.end_early(6)
    assert SavedRun(tmp_path / "a").state is RunState.FINISHED
    (tmp_path / "a" / "ended-early.json").write_text("{")
    assert SavedRun(tmp_path / "a").state is RunState.FAILED
    RunFiles(tmp_path / "a").set_aside()
    assert not (tmp_path / "a" / "ended-early.json").exists(), "it belongs to the earlier run"


def test_a_run_without_any_prompts_has_finished_without_a_checkpoint(tmp_path):
    settings = settings_of(tmp_path / "a")
    with Tracker(settings.tracking, RunHeader.from_sections("miles", settings, "words", "formula", 10)) as tracker:
        tracker.end_early(0)
    assert SavedRun(tmp_path / "a").state is RunState.FINISHED


def test_a_checkpoint_is_named_by_its_optimizer_steps(tmp_path):
    write_run(tmp_path / "a", 5, saved=(1, 2, 4))
    run = SavedRun(tmp_path / "a")
    assert (run.iterations, run.total_iterations) == (5, 5)
    assert run.checkpoint(4).folder.name == "iter_0000002"
    (run.folder / "checkpoints" / "iter_0000004" / "weights").write_text("")
    assert run.checkpoint(None).iterations == 2, "the newest complete one"
    with pytest.raises(
        InputError, match=r"--step 3: no checkpoint after that optimizer step in .*; give one of 2, 4, 8"
    ):
        run.checkpoint(3)
    (tmp_path / "a").rename(tmp_path / "moved")
    assert SavedRun(tmp_path / "moved").checkpoint(None).iterations == 2, "checkpoints move with the run's folder"
    write_run(tmp_path / "a", 5, saved=(5,))
    assert SavedRun(tmp_path / "moved").checkpoint(None).iterations == 2, "not from a later run in the old place"


def test_the_best_checkpoint_is_listed(tmp_path, capsys):
    write_run(tmp_path / "a", 5, saved=(2, 5), more="--save-best rollout/reward")
    BestCheckpoint("rollout/reward", "max", 0.4, 2, True).save(tmp_path / "a" / "checkpoints")
    assert runs.main([str(tmp_path)]) == 0
    assert "best: iter_0000002 (rollout/reward 0.4)" in capsys.readouterr().out
    assert runs.main([str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["best"]["folder"], entry["best"]["value"]) == ("iter_0000002", 0.4)
    assert SavedRun(tmp_path / "a").checkpoint("best").iterations == 2
    (tmp_path / "a" / "checkpoints" / "best.json").unlink()
    with pytest.raises(InputError, match="--step best: no best checkpoint in .*; give its number"):
        SavedRun(tmp_path / "a").checkpoint("best")


def test_runs_are_listed_without_torch(tmp_path, capsys):
    write_run(tmp_path / "x" / "a", 5, saved=(5,))
    write_run(tmp_path / "x" / "a" / "earlier-1", 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{")
    assert runs_below(tmp_path) == [tmp_path / "b", tmp_path / "x" / "a"]
    code = (
        f"import sys; from miles.cli import main; main(['runs', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rows = [re.split(r"\s{2,}", line) for line in ended.stdout.splitlines()]
    assert rows[1][1] == "unreadable"
    assert rows[2][1:] == ["finished", "5/5", "1.000", "-", "1, newest complete: iter_0000005"]
    assert runs.main([str(tmp_path), "--json"]) == 0
    broken, whole = json.loads(capsys.readouterr().out)
    assert "run.json: cannot be read" in broken["error"]
    assert whole["metrics"] == {"rollout/reward": 1.0} and whole["checkpoints"][0]["step"] == 10
