"""Checkpoints in remote storage: complete or not there, found again from elsewhere, and never lost."""

import json
import threading
from dataclasses import replace

import pytest

from miles.base import storage as remote_folder
from miles.base.disk_faults import WriteFailed
from miles.base.storage import RemoteFolder
from miles.config.checkpoint import CheckpointArguments
from miles.config.settings import Settings
from miles.config.tracking import TrackingArguments
from miles.run import remote_checkpoints as uploads_module
from miles.run.best_checkpoint import BestCheckpoint, best_in
from miles.run.remote_checkpoints import INCOMPLETE, RemoteCheckpoints, index_all, pending_in, uploading
from miles.run.resume import check_load_folder, own_save_folder, resume_point
from miles.training.checkpoint_files import STATE, all_in, is_only_remote, publish, staging
from tests.fast.support.failing_storage import register

URL = "failing://bucket/run"


@pytest.fixture(autouse=True)
def storage(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_folder, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(RemoteFolder.__init__, "__defaults__", (None, (0.0, 0.0)))
    monkeypatch.setattr("miles.run.resume.check_checkpoint", lambda folder: None)  # no tensors here
    return register(tmp_path / "storage")


@pytest.fixture
def machine(tmp_path):
    """Return the settings of a run on a machine of a name."""

    def on(name, load=False, **flags):
        out = tmp_path / name
        section = CheckpointArguments(save=URL, load=URL if load else None, remote_cache=str(out / "remote"), **flags)
        return Settings(checkpoint=section, tracking=TrackingArguments(output_dir=str(out)))

    return on


def save(settings, iterations, run="a", content="weights"):
    """Publish a checkpoint of two small files in the local copy."""
    root = settings.checkpoint.local(settings.checkpoint.save)
    folder = staging(root, iterations)
    launcher = {"rollouts_done": iterations, "prompts": {}, "run": {"id": run, "started": "2026-01-01"}}
    (folder / STATE).write_text(json.dumps({"launcher": launcher, "schedule": {"steps_done": iterations}}))
    (folder / "critic").mkdir()
    (folder / "critic/__0_0.distcp").write_text(f"{content} {iterations}")
    return publish(root, iterations)


def save_and_upload(settings, *iterations, best=None):
    with uploading(settings, None) as uploads:
        for done in iterations:
            uploads.add_checkpoint(save(settings, done), best)
        uploads.settle()


def remote_names(storage):
    root = storage.root / "bucket/run"  # as object storage, which has no folders without files
    return sorted({path.relative_to(root).parts[0] for path in root.rglob("*") if path.is_file()})


def local_names(settings, only_remote):
    root = settings.checkpoint.local(settings.checkpoint.save)
    return [path.name for path in all_in(root) if is_only_remote(path) == only_remote]


def names(*iterations):
    return [f"iter_{done:07d}" for done in iterations]


def test_a_checkpoint_is_uploaded_whole_with_its_manifest_last(storage, machine):
    here = machine("here")
    save_and_upload(here, 2)
    put = [path.rpartition("iter_0000002/")[2] for verb, path in storage.calls if verb in ("put", "pipe")]
    assert put[0] == INCOMPLETE and put[-1] == "manifest.json"
    assert sorted(put[1:-1]) == ["critic/__0_0.distcp", "state.json"]
    local, there = here.checkpoint.local(URL) / names(2)[0], storage.root / "bucket/run" / names(2)[0]
    assert {p.relative_to(there).as_posix(): p.read_bytes() for p in there.rglob("*") if p.is_file()} == {
        name: (local / name).read_bytes() for name in ("manifest.json", "state.json", "critic/__0_0.distcp")
    }


def test_the_files_of_the_newest_alone_stay_on_the_machine(machine):
    here = machine("here")
    save_and_upload(here, 2, 4, 6)
    assert local_names(here, only_remote=False) == names(6)
    assert local_names(here, only_remote=True) == names(2, 4)


def test_another_machine_resumes_the_newest_from_the_remote_folder_alone(machine, capsys):
    save_and_upload(machine("here"), 2, 4)
    there = machine("there", load=True)
    assert index_all(there.checkpoint, there_out := there.checkpoint.local(URL).parents[1]) == []
    assert check_load_folder(there.checkpoint) == []
    point = resume_point(there.checkpoint)
    resumed = there.checkpoint.local(URL) / names(4)[0]
    assert point.checkpoint.load == str(resumed) and there_out in resumed.parents
    assert (resumed / "critic/__0_0.distcp").read_text() == "weights 4"
    assert f"note: {URL}: downloading iter_0000004 (" in capsys.readouterr().out
    assert own_save_folder(point.checkpoint) == point.checkpoint
    assert local_names(there, only_remote=True) == names(2)


def test_one_checkpoint_is_named_by_its_url(machine):
    save_and_upload(machine("here"), 2, 4)
    section = replace(machine("there").checkpoint, save=None, load=f"{URL}/iter_0000002")
    index_all(section, section.local(URL).parents[1])
    point = resume_point(section)
    assert point.checkpoint.load == str(section.local(URL) / "iter_0000002")
    assert [path.name for path in all_in(section.local(URL))] == names(2)


def test_a_folder_with_checkpoints_of_another_run_is_refused_without_downloading_them(storage, machine):
    save_and_upload(machine("here"), 2, 4)
    there = machine("there")
    storage.calls.clear()
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    with pytest.raises(ValueError, match=f"{URL}: holds checkpoints of run a of 2026-01-01, up to iter_0000004, "):
        own_save_folder(there.checkpoint)
    over = own_save_folder(replace(there.checkpoint, start_over=True))
    assert over.save.startswith(f"{URL}/run-")
    assert all(verb != "get" for verb, _ in storage.calls)


def test_a_remote_folder_of_two_runs_is_not_loaded(machine):
    here = machine("here")
    save_and_upload(here, 2)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 4, run="b"))
        uploads.settle()
    there = machine("there", load=True)
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    with pytest.raises(ValueError, match=f"of 2 runs .*, for example --load {URL}/iter_0000004"):
        check_load_folder(there.checkpoint)


def test_an_upload_that_was_killed_is_no_checkpoint_and_is_done_again(storage, machine):
    here = machine("here")
    save_and_upload(here, 2)

    def before(verb, path):
        if verb == "pipe" and path.endswith("iter_0000004/manifest.json"):
            raise KeyboardInterrupt  # as if the process ended here

    storage.before = staticmethod(before)
    folder = save(here, 4)
    with pytest.raises(KeyboardInterrupt):
        RemoteCheckpoints.of(here.checkpoint, URL).upload(folder, before_publishing=lambda: None)
    register(storage.root)

    reader = replace(machine("reader", load=True).checkpoint, save=None)
    index_all(reader, reader.local(URL).parents[1])
    point = resume_point(reader)
    assert point.checkpoint.load.endswith("iter_0000002")
    assert point.notes[0] == f"--load {URL}: iter_0000004 is damaged and was passed over: its upload was not finished"

    again = machine("here", load=True)
    notes = index_all(again.checkpoint, again.checkpoint.local(URL).parents[1])
    assert notes == [f"{URL}: iter_0000004 is not there yet, and complete in {again.checkpoint.local(URL)}"]
    point = resume_point(again.checkpoint)
    assert point.checkpoint.load == str(folder)
    with uploading(again, None) as uploads:
        uploads.settle()
    assert remote_names(storage) == names(2, 4) and pending_in(folder.parent) == []
    assert not (storage.root / "bucket/run/iter_0000004" / INCOMPLETE).exists()


def test_a_replacement_or_removal_that_was_killed_at_once_has_removed_nothing(storage, machine):
    here = machine("here")
    save_and_upload(here, 2)
    marker = storage.root / "bucket/run/iter_0000002" / INCOMPLETE
    marker.touch()
    there = machine("there", load=True)
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    assert resume_point(there.checkpoint).checkpoint.load.endswith("iter_0000002")
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(here.checkpoint.local(URL) / "iter_0000002")
        uploads.settle()
    assert not marker.exists() and (marker.parent / "manifest.json").is_file()


def test_a_remote_file_that_was_cut_is_uploaded_again(storage, machine):
    save_and_upload(machine("here"), 2)
    cut = storage.root / "bucket/run/iter_0000002/critic/__0_0.distcp"
    cut.write_text("w")
    again = machine("here", load=True)
    index_all(again.checkpoint, again.checkpoint.local(URL).parents[1])
    with uploading(again, None) as uploads:
        uploads.settle()
    assert cut.read_text() == "weights 2"


def test_a_damaged_remote_checkpoint_is_passed_over(storage, machine):
    save_and_upload(machine("here"), 2, 4)
    (storage.root / "bucket/run/iter_0000004/critic/__0_0.distcp").unlink()
    there = machine("there", load=True)
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    from miles.training.checkpoint_files import check_against_manifest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("miles.run.resume.check_checkpoint", check_against_manifest)
        point = resume_point(there.checkpoint)
        assert "critic/__0_0.distcp is missing" in point.notes[0] and point.checkpoint.load.endswith("iter_0000002")
        with pytest.raises(ValueError, match="--no-load-fallback"):
            resume_point(replace(there.checkpoint, no_load_fallback=True))
    assert own_save_folder(point.checkpoint, point.damaged) == point.checkpoint


def test_pruning_removes_remote_checkpoints_after_a_newer_one_is_complete(storage, machine):
    here = machine("here", save_keep_last=1, save_retain_interval=4)

    def before(verb, path):
        if verb == "rm" and path.endswith("/manifest.json") and (storage.root / path).is_file():
            whole = [p for p in (storage.root / "bucket/run").iterdir() if (p / "manifest.json").is_file()]
            assert len(whole) > 1, "the last complete checkpoint was to be removed"
            removed.append(path.split("/")[-2])

    removed = []
    storage.before = staticmethod(before)
    save_and_upload(here, 2, 4, 6, 8, 10)
    assert removed == names(2, 6)
    assert remote_names(storage) == names(4, 8, 10)


def test_a_run_prunes_what_it_found_and_nothing_that_another_program_put_there(storage, machine):
    save_and_upload(machine("here"), 2, 4)
    there = machine("there", load=True, save_keep_last=1)
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    point = resume_point(there.checkpoint)
    (storage.root / "bucket/run/iter_0000003").mkdir()
    (storage.root / "bucket/run/iter_0000003/state.json").write_text("{}")
    save_and_upload(replace(there, checkpoint=point.checkpoint), 6)
    assert remote_names(storage) == names(3, 6)


def test_the_best_checkpoint_is_recorded_and_kept(storage, machine):
    here = machine("here", save_best="rollout/reward", save_keep_last=1)
    best = BestCheckpoint("rollout/reward", "max", 0.5, 2, due=True)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 2), best)
        for done in (4, 6):
            uploads.add_checkpoint(save(here, done))
        uploads.settle()
    assert remote_names(storage) == ["best.json", *names(2, 6)]
    there = machine("there", load=True, save_best="rollout/reward", save_keep_last=1)
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    assert best_in(there.checkpoint.local(URL)) == best


def test_an_upload_that_fails_is_reported_once_and_made_up_for(storage, machine, capsys):
    here = machine("here")
    broken = True

    def before(verb, path):
        if broken and verb == "put":
            raise ConnectionError("reset")

    storage.before = staticmethod(before)
    with uploading(here, None) as uploads:
        for done in (2, 4):
            uploads.add_checkpoint(save(here, done))
        with pytest.raises(WriteFailed) as caught:
            uploads.settle()
        folder = here.checkpoint.local(URL) / "iter_0000002"
        what = f"--save {URL}: the checkpoint after 2 iterations and 1 later folder is not uploaded, because "
        assert str(caught.value).startswith(what)
        assert str(caught.value).endswith(f"after 3 tries (ConnectionError: reset); it is complete in {folder}")
        assert pending_in(folder.parent) == [folder.parent / name for name in names(2, 4)]
        assert "manifest.json" not in [p.name for p in (storage.root / "bucket").rglob("*")]
        broken = False
        uploads.settle()
    assert remote_names(storage) == names(2, 4)
    notes = capsys.readouterr().out.splitlines()
    assert len(notes) == 1 and notes[0].startswith("note: --save") and "it is tried again" in notes[0]


def test_while_uploads_fail_only_what_would_stay_is_kept(storage, machine):
    here = machine("here", save_keep_last=2)
    broken = True

    def before(verb, path):
        if broken and verb == "put":
            raise ConnectionError("reset")

    storage.before = staticmethod(before)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 2))
        with pytest.raises(WriteFailed):
            uploads.settle()
        for done in (4, 6, 8):
            uploads.add_checkpoint(save(here, done))
        assert local_names(here, only_remote=False) == names(2, 6, 8)
        broken = False
        uploads.settle()
    assert remote_names(storage) == names(6, 8)


def test_a_try_that_began_earlier_is_not_the_last_one(storage, machine):
    here = machine("here")
    began, may_fail = threading.Event(), threading.Event()

    def before(verb, path):
        if verb == "put" and not may_fail.is_set():
            began.set()
            may_fail.wait()
            raise PermissionError("read-only")  # is not tried again at once

    storage.before = staticmethod(before)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 2))
        began.wait()
        threading.Timer(0.2, may_fail.set).start()  # while settle waits
        uploads.settle()
    assert remote_names(storage) == names(2)


def test_a_file_that_arrives_cut_is_noticed(storage, machine):
    here = machine("here")

    def before(verb, path):
        if verb == "find" and (cut := storage.root / "bucket/run/iter_0000002/critic/__0_0.distcp").is_file():
            cut.write_text("w")

    storage.before = staticmethod(before)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 2))
        with pytest.raises(WriteFailed, match="critic/__0_0.distcp has 1 bytes after its upload, not 9"):
            uploads.settle()


def test_a_checkpoint_that_is_replaced_is_uploaded_again(storage, machine):
    here = machine("here")
    save_and_upload(here, 2)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 2, content="other weights"))
        uploads.settle()
    assert (storage.root / "bucket/run/iter_0000002/critic/__0_0.distcp").read_text() == "other weights 2"


def test_the_remote_folder_is_right_about_what_another_machine_has_continued(machine):
    here = machine("here")
    save_and_upload(here, 2)
    forked = save(here, 4, content="forked")
    save(here, 5)
    there = machine("there", load=True)
    index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
    there = replace(there, checkpoint=resume_point(there.checkpoint).checkpoint)
    save_and_upload(there, 4, 6)
    again = machine("here", load=True)
    assert index_all(again.checkpoint, again.checkpoint.local(URL).parents[1]) == []
    assert is_only_remote(forked) and not (forked / "critic").exists()
    assert local_names(here, only_remote=True) == names(4, 6)


def test_checkpoints_that_vanished_from_the_remote_folder_are_uploaded_again(storage, machine):
    here = machine("here")
    save_and_upload(here, 2)
    for path in sorted((storage.root / "bucket/run/iter_0000002").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = machine("here", load=True)
    index_all(again.checkpoint, again.checkpoint.local(URL).parents[1])
    with uploading(again, None) as uploads:
        uploads.settle()
    assert (storage.root / "bucket/run/iter_0000002/manifest.json").is_file()


def test_a_launcher_whose_lock_was_taken_over_publishes_nothing(storage, machine):
    class Lost:
        def is_held(self):
            return False

    here = machine("here")
    with uploading(here, Lost()) as uploads:
        uploads.add_checkpoint(save(here, 2))
        with pytest.raises(WriteFailed, match="another run has taken over"):
            uploads.settle()
    assert not (storage.root / "bucket/run/iter_0000002/manifest.json").exists()


def test_a_further_save_waits_for_room(storage, machine, monkeypatch):
    here, go = machine("here"), threading.Event()
    storage.before = staticmethod(lambda verb, path: go.wait() if verb == "put" else None)
    with uploading(here, None) as uploads:
        for done in range(1, uploads_module.MOST_WAITING + 1):
            uploads.make_room(save(here, done))
            uploads.add_checkpoint(here.checkpoint.local(URL) / names(done)[0])
        waiter = threading.Thread(target=uploads.make_room, args=(here.checkpoint.local(URL) / names(9)[0],))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        go.set()
        waiter.join(60)
        assert not waiter.is_alive()
        uploads.settle()


def test_a_run_that_waits_for_an_upload_says_so(storage, machine, monkeypatch, capsys):
    here, go = machine("here"), threading.Event()
    monkeypatch.setattr(uploads_module, "NOTE_SECONDS", 0.0)
    storage.before = staticmethod(lambda verb, path: go.wait() if verb == "put" else None)
    with uploading(here, None) as uploads:
        uploads.add_checkpoint(save(here, 2))
        waiter = threading.Thread(target=uploads.settle)
        waiter.start()
        said = ""
        while "note: the run has been waiting for the upload of" not in said:  # pytest-timeout ends it
            assert waiter.is_alive()
            said += capsys.readouterr().out
        go.set()
        waiter.join()
    assert "iter_0000002 for " in said and "not uploaded yet: 1 folder" in said


def test_metrics_follow_the_checkpoints_to_another_machine(storage, machine):
    here = machine("here")
    out = here.checkpoint.local(URL).parents[1]
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    (out / "run.json").write_text("{}")
    save_and_upload(here, 2)
    assert remote_names(storage) == [*names(2), "metrics.jsonl", "run.json"]
    there = machine("there", load=True)
    there_out = there.checkpoint.local(URL).parents[1]
    index_all(there.checkpoint, there_out)
    assert (there_out / "metrics.jsonl").read_text() == '{"step": 1}\n'
    (there_out / "metrics.jsonl").write_text("mine")
    index_all(there.checkpoint, there_out)
    assert (there_out / "metrics.jsonl").read_text() == "mine"


def test_an_export_is_uploaded_with_its_configuration_last(storage, machine, tmp_path):
    here = replace(machine("here"), checkpoint=replace(machine("here").checkpoint, save_hf="failing://hub/model"))
    old = storage.root / "hub/model"
    old.mkdir(parents=True)
    (old / "model-00001-of-00002.safetensors").write_text("old")
    (old / "README.md").write_text("mine")
    folder = tmp_path / "export"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    with uploading(here, None) as uploads:
        uploads.add_export(folder, "failing://hub/model")
        uploads.settle()
    assert sorted(p.name for p in old.iterdir()) == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert [path for verb, path in storage.calls if verb == "put"][-1] == "hub/model/config.json"
    assert not folder.exists()


def test_storage_that_does_not_answer_is_one_sentence(storage, machine):
    def before(verb, path):
        raise ConnectionError("reset")

    there = machine("there", load=True)
    storage.before = staticmethod(before)
    with pytest.raises(ValueError, match=rf"--(save|load) {URL}: .* cannot be listed after 3 tries .*; check"):
        index_all(there.checkpoint, there.checkpoint.local(URL).parents[1])
