"""A checkpoint folder belongs to one run: no other run may save into it, and a mixed folder is not resumed."""

import json

import pytest

from miles.config.checkpoint import CheckpointArguments
from miles.observe.run_files import RunIdentity
from miles.run.resume import branch_of, check_load_folder, own_save_folder

OLD = RunIdentity("old", "2026-01-01 10:00:00")
NEW = RunIdentity("new", "2026-01-02 10:00:00")


@pytest.fixture
def saved(tmp_path):
    """Write a checkpoint of ``run`` after some iterations; without a run id if it is None, as in earlier versions."""

    def save(iterations, run, folder="checkpoints"):
        path = tmp_path / folder / f"iter_{iterations:07d}"
        path.mkdir(parents=True)
        launcher = {"rollouts_done": iterations} | ({} if run is None else {"run": run.to_state()})
        (path / "state.json").write_text(json.dumps({"launcher": launcher}))
        return str(path.parent)

    return save


def test_an_empty_or_new_folder_is_free(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        section = CheckpointArguments(save=str(folder))
        assert own_save_folder(section) == section


def test_a_new_run_does_not_save_among_the_checkpoints_of_another(saved):
    folder = saved(60, OLD)
    with pytest.raises(
        ValueError, match=r"--save .*: holds checkpoints of run old of 2026-01-01 10:00:00, up to iter_0000060, "
    ):
        own_save_folder(CheckpointArguments(save=folder))


def test_a_run_that_continues_the_newest_checkpoint_saves_in_its_folder(saved):
    saved(20, OLD)
    folder = saved(60, OLD)
    for load in (folder, f"{folder}/iter_0000060"):
        section = CheckpointArguments(save=folder, load=load)
        assert own_save_folder(section) == section


@pytest.mark.parametrize(
    "load, finetune, this",
    [
        (None, False, "a new run, without --load"),
        ("elsewhere", True, "a new run, with the weights of --load {load}"),
        ("elsewhere", False, "run new of 2026-01-02 10:00:00, which continues from {load}/iter_0000007"),
        ("unnamed", False, "an earlier run, which continues from {load}/iter_0000007"),
        ("missing", False, "a new run, as --load {load} holds no checkpoint"),
    ],
)
def test_the_refusal_names_both_runs(saved, tmp_path, load, finetune, this):
    folder = saved(60, OLD)
    saved(7, NEW, folder="elsewhere")
    saved(7, None, folder="unnamed")
    section = CheckpointArguments(save=folder, load=None if load is None else f"{tmp_path}/{load}", finetune=finetune)
    with pytest.raises(ValueError) as refused:
        own_save_folder(section)
    both = f"holds checkpoints of run old of 2026-01-01 10:00:00, up to iter_0000060, and this is {this}; to begin"
    assert both.format(load=section.load) in str(refused.value)


@pytest.mark.parametrize("change", [{"finetune": True}, {"load": "iter_0000020"}, {"load": "elsewhere"}])
def test_any_other_start_is_refused(saved, tmp_path, change):
    saved(20, OLD)
    folder = saved(60, OLD)
    saved(60, OLD, folder="elsewhere")
    load = {"iter_0000020": f"{folder}/iter_0000020", "elsewhere": str(tmp_path / "elsewhere")}
    fields = {"load": folder} | {key: load.get(value, value) for key, value in change.items()}
    with pytest.raises(ValueError, match="--start-over"):
        own_save_folder(CheckpointArguments(save=folder, **fields))


def test_start_over_saves_into_a_new_folder_inside(saved, tmp_path):
    folder = saved(60, OLD)
    path = own_save_folder(CheckpointArguments(save=folder, start_over=True)).save
    assert path.startswith(f"{folder}/run-") and not (tmp_path / path).exists()


def test_start_over_changes_nothing_in_a_free_folder(tmp_path, saved):
    section = CheckpointArguments(save=str(tmp_path / "new"), start_over=True)
    assert own_save_folder(section) == section


def test_a_folder_of_two_runs_is_not_resumed(saved):
    saved(3, NEW)
    folder = saved(60, OLD)
    with pytest.raises(ValueError, match=r"2 runs \(run new .* up to iter_0000003; run old .* up to iter_0000060\)"):
        check_load_folder(CheckpointArguments(load=folder))
    assert check_load_folder(CheckpointArguments(load=f"{folder}/iter_0000003")) == []


def test_a_damaged_checkpoint_is_no_other_run(saved, tmp_path):
    """It does not say which run it is of. Whether it may be loaded is decided elsewhere (resume_point.py)."""
    folder = saved(20, OLD)
    (tmp_path / "checkpoints" / "iter_0000060").mkdir()
    assert check_load_folder(CheckpointArguments(load=folder)) == []
    (tmp_path / "checkpoints" / "iter_0000060" / "state.json").write_text('{"launcher": {"run": 3}}')
    with pytest.raises(ValueError, match="up to iter_0000060"):
        own_save_folder(CheckpointArguments(save=folder))


def test_a_run_that_passes_over_damaged_checkpoints_saves_in_their_folder(saved, tmp_path):
    folder = saved(60, OLD)
    saved(20, OLD)
    section = CheckpointArguments(save=folder, load=f"{folder}/iter_0000020")
    assert own_save_folder(section, [tmp_path / "checkpoints" / "iter_0000060"]) == section


def test_one_run_is_resumed_without_a_note(saved):
    saved(20, OLD)
    assert check_load_folder(CheckpointArguments(load=saved(60, OLD))) == []


def test_checkpoints_of_earlier_versions_load_with_a_note(saved):
    saved(20, None)
    (note,) = check_load_folder(CheckpointArguments(load=saved(60, None)))
    assert "iter_0000060 does not say which run wrote it" in note


def test_a_run_that_has_continued_checkpoints_of_an_earlier_version_is_resumed_with_a_note(saved):
    saved(20, None)
    saved(40, NEW)
    (note,) = check_load_folder(CheckpointArguments(load=saved(60, NEW)))
    assert "checkpoints up to iter_0000020 do not say which run wrote them" in note


def test_an_earlier_version_that_has_saved_more_than_a_run_is_another_run(saved):
    saved(40, NEW)
    with pytest.raises(ValueError, match=r"2 runs \(run new .* up to iter_0000040; an earlier run up to iter_"):
        check_load_folder(CheckpointArguments(load=saved(60, None)))


def test_without_a_checkpoint_nothing_is_checked(tmp_path):
    assert check_load_folder(CheckpointArguments()) == check_load_folder(CheckpointArguments(load=str(tmp_path))) == []


def test_a_run_from_an_earlier_checkpoint_than_the_newest_is_a_new_one(saved):
    for iterations in (20, 40):
        folder = saved(iterations, OLD)
    saved(60, NEW)
    branch, notes = branch_of(CheckpointArguments(load=f"{folder}/iter_0000020"))
    assert branch == f"{folder}/iter_0000020"
    assert notes == [
        f"--load {folder}/iter_0000020: run old of 2026-01-01 10:00:00 has continued from this checkpoint, to "
        "iter_0000040, so this is a new run with its own metrics"
    ]
    for load in ("", "iter_0000040", "iter_0000060"):  # the folder; the newest of its run, and of another one
        assert branch_of(CheckpointArguments(load=f"{folder}/{load}".rstrip("/"))) == (None, [])
    assert branch_of(CheckpointArguments(load=f"{folder}/iter_0000020", finetune=True)) == (None, [])
    assert branch_of(CheckpointArguments()) == (None, [])
