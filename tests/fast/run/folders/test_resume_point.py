"""The newest complete checkpoint is resumed, damaged ones are named, and the launcher ends with one sentence."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch.distributed.checkpoint as dcp
from small_checkpoint import one_rank, save_checkpoint, tensors

from miles.config.checkpoint import CheckpointArguments
from miles.config.model import ModelArguments
from miles.run.checkpoints import check_same_steps
from miles.run.resume import check_frozen_models, resume_point
from miles.training.checkpoint_files import publish, reference_folder, staging, write_run_state


@pytest.fixture
def root(tmp_path):
    for iterations in (2, 4, 6):
        save_checkpoint(tmp_path / "run", iterations)
    return tmp_path / "run"


def damage(folder, name="__0_0.distcp"):
    os.truncate(folder / name, 10)


def test_the_newest_checkpoint_is_loaded_and_its_cost_is_noted(root):
    point = resume_point(CheckpointArguments(load=str(root)))
    assert point.checkpoint.load == str(root / "iter_0000006") and point.damaged == ()
    (note,) = point.notes
    assert note.startswith(f"--load {root}: iter_0000006 is complete (4 files, ") and note.endswith(" s)")


def test_a_checkpoint_of_an_earlier_version_is_loaded_with_a_note(root):
    newest = root / "iter_0000006"
    (newest / "manifest.json").unlink()
    state = json.loads((newest / "state.json").read_text())
    del state["manifest"]
    (newest / "state.json").write_text(json.dumps(state))
    point = resume_point(CheckpointArguments(load=str(root)))
    assert point.checkpoint.load == str(newest)
    note = f"--load {root}: iter_0000006 has no manifest (an earlier version of miles), so its files are not verified"
    assert point.notes == (note,)


def test_a_run_of_other_steps_per_iteration_does_not_continue(tmp_path):
    """Its rows of metrics.jsonl would have the numbers of others, and its learning rate would have decayed too far."""
    root = tmp_path / "run"
    for iterations, launcher in ((2, {}), (4, {"steps_per_iteration": 2})):
        save_checkpoint(root, iterations, **launcher)
    loading = CheckpointArguments(load=str(root))
    check_same_steps(loading, 2)
    with pytest.raises(ValueError, match=r"--load .*: iter_0000004 is of a run of 2 optimizer steps per iteration"):
        check_same_steps(loading, 1)
    check_same_steps(CheckpointArguments(load=str(root), finetune=True), 1)
    check_same_steps(CheckpointArguments(load=str(root / "iter_0000002")), 1)  # of an earlier version
    check_same_steps(CheckpointArguments(load=str(tmp_path / "empty")), 1)


def test_damaged_checkpoints_are_passed_over_with_a_note(root):
    damage(root / "iter_0000006")
    (root / "iter_0000008").mkdir()
    point = resume_point(CheckpointArguments(load=str(root)))
    assert point.checkpoint.load == str(root / "iter_0000004")
    assert [path.name for path in point.damaged] == ["iter_0000008", "iter_0000006"]
    assert point.notes[0] == f"--load {root}: iter_0000008 is damaged and was passed over: the folder is empty"
    assert "iter_0000006 is damaged and was passed over: __0_0.distcp is truncated (10 bytes, " in point.notes[1]


def test_the_fallback_can_be_forbidden(root):
    section = CheckpointArguments(load=str(root), no_load_fallback=True)
    assert resume_point(section).checkpoint.load == str(root / "iter_0000006")
    damage(root / "iter_0000006", "state.json")
    with pytest.raises(ValueError, match=r"iter_0000006 is damaged: state.json is not valid JSON .*--no-load-fallback"):
        resume_point(section)


def test_a_checkpoint_that_is_named_itself_has_no_substitute(root):
    named = root / "iter_0000004"
    assert resume_point(CheckpointArguments(load=str(named))).checkpoint.load == str(named)
    damage(named, ".metadata")
    with pytest.raises(ValueError, match=r"--load .*iter_0000004: this checkpoint is damaged: .metadata is truncated"):
        resume_point(CheckpointArguments(load=str(named)))
    (named / "state.json").unlink()
    with pytest.raises(ValueError, match=r"damaged: state.json is missing"):
        resume_point(CheckpointArguments(load=str(named)))


def test_a_run_does_not_start_over_because_all_checkpoints_are_damaged(root):
    for folder in root.iterdir():
        damage(folder)
    with pytest.raises(ValueError, match=r"no checkpoint in it is complete \(iter_0000006: .*; iter_0000004: .*; iter"):
        resume_point(CheckpointArguments(load=str(root)))


def test_a_replaced_checkpoint_is_taken_if_the_one_that_replaces_it_is_damaged(root):
    shutil.copytree(root / "iter_0000006", root / ".replaced_iter_0000006")
    damage(root / "iter_0000006")
    assert resume_point(CheckpointArguments(load=str(root))).checkpoint.load == str(root / ".replaced_iter_0000006")


def test_a_checkpoint_under_the_name_of_a_later_one_is_passed_over(root):
    (root / "iter_0000002").rename(root / "iter_0000009")
    point = resume_point(CheckpointArguments(load=str(root)))
    assert point.checkpoint.load == str(root / "iter_0000006") and point.damaged == (root / "iter_0000009",)


def test_without_checkpoints_nothing_is_loaded(tmp_path):
    section = CheckpointArguments()
    assert resume_point(section).checkpoint == section and resume_point(section).notes == ()
    start = "so the run starts from the beginning"
    for load, save, note in (
        (str(tmp_path), "./own", f"--load {tmp_path}: holds no checkpoint, {start}"),
        ("own", "./own", f"--load own: there is no such folder, {start}"),
    ):
        section = CheckpointArguments(load=load, save=save)
        point = resume_point(section)
        assert point.checkpoint == section and point.notes == (note,)
        with pytest.raises(ValueError, match=r"--load .*: --finetune wants the weights of a checkpoint"):
            resume_point(replace(section, finetune=True))


def test_a_named_checkpoint_that_is_gone_is_not_a_new_run(root):
    with pytest.raises(ValueError, match=r"--load .*iter_0000099: there is no such checkpoint"):
        resume_point(CheckpointArguments(load=str(root / "iter_0000099")))


def test_a_frozen_model_has_no_substitute(root, tmp_path):
    for nothing in (None, str(tmp_path), "owner/model"):
        assert check_frozen_models(ModelArguments(ref_load=nothing, opd_teacher_load=nothing)) == []
    (note,) = check_frozen_models(ModelArguments(ref_load=str(root)))
    assert "--ref-load" in note and "iter_0000006" in note
    damage(root / "iter_0000006")
    for field, flag in (("ref_load", "--ref-load"), ("opd_teacher_load", "--opd-teacher-load")):
        with pytest.raises(ValueError, match=rf"{flag} .*run: the checkpoint iter_0000006 is damaged: "):
            check_frozen_models(ModelArguments(**{field: str(root)}))


def test_the_reference_in_a_checkpoint_is_a_frozen_model(tmp_path):
    """Its checkpoint lists its files; it has no state of a run."""
    within = reference_folder(staging(tmp_path, 4))
    with one_rank():
        dcp.save({"model": tensors()["model"]}, checkpoint_id=within)
        write_run_state(within, "fsdp", {}, {"steps_done": 0})
    reference = reference_folder(publish(tmp_path, 4))
    (note,) = check_frozen_models(ModelArguments(ref_load=f"{reference}/"))
    assert note.startswith(f"--ref-load {reference}/: reference is complete (3 files, ")
    damage(reference)
    with pytest.raises(ValueError, match=r"the checkpoint reference is damaged: reference/__0_0.distcp is truncated"):
        check_frozen_models(ModelArguments(ref_load=str(reference)))
