"""A sweep reads the state of a run from its folder: finished, to be resumed or restarted, or not to be touched."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from sweep_files import planned, write_run_of

from miles.base.locks import locked_folders
from miles.commands.sweeps.definition import PlannedRun
from miles.commands.sweeps.swept_run import FILE_NAME, Attempt, RunStart, SweptRun
from miles.observe.run_files import RunFiles
from miles.run.resume import own_save_folder
from miles.training.checkpoint_files import publish, staging

PROGRAM = [sys.executable, "-m", "miles", "train"]


def one(folder: Path, **flags: str) -> PlannedRun:
    (run,) = planned(folder, flags)[1]
    return run


def save(run: PlannedRun, iteration: int) -> None:
    checkpoints = run.folder / "checkpoints"
    (staging(checkpoints, iteration) / "weights").write_text("whole")
    publish(checkpoints, iteration)


def test_a_new_run_starts(tmp_path: Path) -> None:
    run = SweptRun(one(tmp_path))
    assert (run.start, run.in_words(), run.fraction(), run.fault()) == (RunStart.NEW, "starts", 0.0, None)
    assert run.command() == [*PROGRAM, *run.planned.words]


def test_a_run_with_all_its_steps_is_finished(tmp_path: Path) -> None:
    run = write_run_of(one(tmp_path))
    assert run.is_finished and run.fraction() == 1.0 and run.fault() is None


def test_a_run_that_ended_early_without_prompts_is_finished(tmp_path: Path) -> None:
    run = write_run_of(one(tmp_path), steps=4)
    RunFiles(run.folder).mark_ended_early(4)
    assert run.is_finished and run.fault() is None


def test_an_interrupted_run_without_checkpoint_starts_again(tmp_path: Path) -> None:
    run = write_run_of(one(tmp_path), steps=4)
    assert run.in_words() == "starts again, as it has no checkpoint" and run.fraction() == 0.4
    assert run.command() == [*PROGRAM, *run.planned.words]


def test_an_interrupted_run_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    planned_run = one(tmp_path, save="x", save_interval="2")
    run = write_run_of(planned_run, steps=5)
    assert run.start is RunStart.RESTARTS, "it has saved nothing yet"
    save(planned_run, 2)
    save(planned_run, 4)
    assert run.in_words() == "resumes after iteration 4"
    assert planned_run.resuming is not None and run.command() == [*PROGRAM, *planned_run.resuming]
    finished = write_run_of(one(tmp_path / "other", save="x"))
    assert finished.start is RunStart.RESTARTS, "the last checkpoint is missing"
    save(finished.planned, 10)
    assert finished.is_finished


def test_damaged_checkpoints_that_would_be_refused_at_each_start_are_told(tmp_path: Path) -> None:
    """The run cannot resume from them, and miles train saves nothing alongside checkpoints of another run."""
    planned_run = one(tmp_path, save="x", save_interval="2")
    run = write_run_of(planned_run, steps=5)
    save(planned_run, 2)
    save(planned_run, 4)
    root = run.folder / "checkpoints"
    (root / "iter_0000004" / "weights").write_text("")
    assert run.fault() is None, "it resumes from the other one"
    (root / "iter_0000002" / "weights").write_text("")
    fault = run.fault() or ""
    assert "no checkpoint is complete (iter_0000002, iter_0000004)" in fault and f"; remove {root} to" in fault
    with pytest.raises(ValueError, match="holds checkpoints"):
        own_save_folder(planned_run.settings.checkpoint)
    (run.folder / "run.json").write_text("{")
    assert f"remove {run.folder} to start it again" in (SweptRun(planned_run).fault() or "")
    shutil.rmtree(root)
    assert SweptRun(planned_run).fault() is None and SweptRun(planned_run).start is RunStart.RESTARTS


def test_a_run_that_failed_before_its_first_step_starts_again(tmp_path: Path) -> None:
    run = SweptRun(one(tmp_path))
    run.begin()
    run.note(Attempt("2026-01-01 10:00:00", 1.5, 1, "it broke"))
    assert run.start is RunStart.RESTARTS and run.fraction() == 0.0 and run.fault() is None


def test_attempts_are_kept_over_calls_of_the_sweep(tmp_path: Path) -> None:
    attempts = [Attempt("2026-01-01 10:00:00", 1.5, 1, "it broke"), Attempt("2026-01-01 10:00:02", 9.0, 0, "done")]
    for attempt in attempts:
        run = SweptRun(one(tmp_path))
        run.begin()
        run.note(attempt)
    assert SweptRun(one(tmp_path)).attempts == attempts


def test_a_run_of_other_flags_is_not_overwritten(tmp_path: Path) -> None:
    write_run_of(one(tmp_path, lr="1e-5", wandb_key="secret1", use_wandb="true"))
    same = SweptRun(one(tmp_path, lr="1e-5", wandb_key="secret2", use_wandb="true"))
    assert same.fault() is None
    assert "secret" not in (same.folder / FILE_NAME).read_text()
    fault = SweptRun(one(tmp_path, lr="1e-4", eps_clip="0.3")).fault()
    assert fault is not None
    assert "was run with other flags (--wandb-key (hidden) -> not given; --use-wandb" in fault.replace(
        "--lr 1e-5 -> 1e-4; ", ""
    )
    assert "--lr 1e-5 -> 1e-4" in fault and "--eps-clip not given -> 0.3" in fault and "give another --out" in fault


def test_a_run_of_another_file_of_settings_is_not_continued(tmp_path: Path) -> None:
    custom = tmp_path / "custom.yaml"
    custom.write_text("lr: 1e-5\n")
    write_run_of(one(tmp_path, custom_config_path=str(custom)))
    assert SweptRun(one(tmp_path, custom_config_path=str(custom))).fault() is None
    custom.write_text("lr: 1e-4\n")
    fault = SweptRun(one(tmp_path, custom_config_path=str(custom))).fault()
    assert fault is not None and "was run with another content of the file of --custom-config-path; restore it" in fault


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    run = SweptRun(one(tmp_path))
    run.folder.mkdir(parents=True)
    assert run.fault() is None, "an empty folder is nobody's"
    (run.folder / "notes.txt").touch()
    assert "holds files that no sweep has written" in (run.fault() or "")
    (run.folder / FILE_NAME).write_text("{}")
    assert "it is no record of a sweep" in (run.fault() or "")


def test_a_run_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    run = write_run_of(one(tmp_path), steps=3)
    with locked_folders([("--output-dir", run.folder)]):
        assert "a process is writing this run" in (run.fault() or "")
    assert run.fault() is None
