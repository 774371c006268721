"""A run before anything is started; and around a run with URLs: lock, resume, upload, say how to resume."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from miles.base.locks import NAME
from miles.config.cluster import ClusterArguments
from miles.config.inputs import Inputs
from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.run import launcher
from miles.run.checkpoints import RunCheckpoints
from miles.run.failures import exit_with_message
from miles.run.restarts import resuming
from miles.training import checkpoint_files
from tests.fast.config.conftest import minimal
from tests.fast.support.small_checkpoint import save_checkpoint


def test_a_stop_may_take_as_long_as_the_flag_says(monkeypatch):
    def requests(seconds):
        raise KeyError(seconds)

    monkeypatch.setattr("miles.run.launcher.StopRequests", requests)
    with pytest.raises(KeyError, match=r"7\.0"):
        launcher.launch(
            SimpleNamespace(settings=Settings(cluster=ClusterArguments(stop_timeout=7.0))), failure_handling=None
        )


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return ``launch(name, run, flags)``: launch a command whose processes and training are the function ``run``."""

    def start(name, run, flags=""):
        monkeypatch.setattr(launcher, "run", run)
        url = f"file://{tmp_path}/bucket/run"
        flags = f"--rollout-shuffle --save {url} --output-dir {tmp_path}/{name} {flags.replace('URL', url)}"
        checked = replace(validate(parse(minimal(flags))), inputs=Inputs())  # there is no model to read rows for
        launcher.launch(checked, exit_with_message)

    return start


def saving(*iterations, fails=None):
    """Return a run that saves after some iterations, and then fails."""

    def run(settings, context):
        section = settings.checkpoint
        for done in iterations:
            context.uploads.make_room(section.local(section.save))
            context.uploads.add_checkpoint(save_checkpoint(section.local(section.save), done))
        if fails is not None:
            raise fails
        context.uploads.settle()

    return run


def test_a_run_is_locked_uploaded_and_resumed_on_another_machine(launch, tmp_path, capsys):
    bucket, seen = tmp_path / "bucket/run", []
    launch("first", saving(2, 4))
    assert sorted(path.name for path in bucket.iterdir()) == ["iter_0000002", "iter_0000004"]

    def resumed(settings, context):
        assert (bucket / NAME).is_file()
        seen.append(settings.checkpoint.load)
        saving(6)(settings, context)

    launch("second", resumed, "--load URL --save-keep-last 1")
    assert len(seen) == 1 and seen[0].startswith(f"{tmp_path}/second/remote/") and seen[0].endswith("/iter_0000004")
    assert sorted(path.name for path in bucket.iterdir()) == ["iter_0000006"]
    out = capsys.readouterr().out
    assert f"note: --load file://{bucket}: iter_0000004 is complete (" in out


def test_a_run_that_is_done_ends_before_anything_starts(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(launcher, "run", lambda settings, context: started.append(settings.checkpoint.load))
    saved = save_checkpoint(tmp_path / "saved", 10)

    def start(flags):
        words = minimal(f"--rollout-shuffle --load {tmp_path}/saved --output-dir {tmp_path}/out {flags}")
        launcher.launch(replace(validate(parse(words)), inputs=Inputs()), exit_with_message)
        return capsys.readouterr().out

    (tmp_path / "hf").mkdir()
    for flags in ("", "--num-rollout 9", f"--save {tmp_path}/saved --save-hf {tmp_path}/hf"):
        (only,) = start(flags).splitlines()  # no notes on how a run would continue
        assert "nothing is left to train; give a larger --num-rollout" in only
    assert started == []
    for flags in ("--num-rollout 11", "--finetune", f"--save-hf {tmp_path}/missing"):
        assert "nothing is left" not in start(flags)
    assert started == [str(saved)] * 3


def test_a_damaged_checkpoint_ends_the_command_with_one_sentence_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launcher, "run", lambda settings, context: pytest.fail("it has started"))
    os.truncate(save_checkpoint(tmp_path / "saved", 6) / "random_state_rank0.pt", 10)
    words = minimal(f"--rollout-shuffle --load {tmp_path}/saved --no-load-fallback --output-dir {tmp_path}/out")
    with pytest.raises(SystemExit, match="1"):
        launcher.launch(replace(validate(parse(words)), inputs=Inputs()), exit_with_message)
    (line,) = capsys.readouterr().err.splitlines()
    fault = "the newest checkpoint iter_0000006 is damaged: random_state_rank0.pt is truncated"
    assert line.partition("error: ")[2].startswith(f"--load {tmp_path}/saved: {fault}")


@pytest.mark.parametrize("shared", ["--save", "--output-dir", "--save-hf", "--update-weight-disk-dir"])
def test_a_second_launcher_in_a_folder_of_the_first_is_refused(tmp_path, monkeypatch, capsys, shared):
    def start(name, run):
        folders = {flag: tmp_path / name / flag.strip("-") for flag in ("--save", "--output-dir", shared)}
        folders[shared] = tmp_path / "shared"
        monkeypatch.setattr(launcher, "run", run)
        words = minimal(" ".join(f"{flag} {folder}" for flag, folder in folders.items()))
        if shared == "--update-weight-disk-dir":
            words += ["--rollout-engine", "sglang", "--update-weight-transfer-mode", "disk"]
        launcher.launch(replace(validate(parse(words)), inputs=Inputs()), exit_with_message)

    def first(settings, context):
        with pytest.raises(SystemExit, match="1"):
            start("second", lambda settings, context: pytest.fail("it has started"))

    start("first", first)
    (line,) = capsys.readouterr().err.splitlines()
    owner = f"another run is writing to this folder (process {os.getpid()} on "
    assert line.startswith(f"miles train: error: {shared} {tmp_path}/shared: {owner}")


def test_a_run_whose_folder_was_taken_over_ends(launch, tmp_path, capsys):
    def stopped_for_long(settings, context):
        context.before_writing()
        owner = {"host": "elsewhere", "pid": 17, "started": "now", "id": "x"}
        (tmp_path / "first" / NAME).write_text(json.dumps(owner))
        context.before_writing()

    with pytest.raises(SystemExit) as ended:
        launch("first", stopped_for_long)
    assert ended.value.code == 1
    assert f"--output-dir {tmp_path}/first: process 17 on elsewhere, since now has taken" in capsys.readouterr().err


def test_a_new_run_does_not_save_among_the_checkpoints_of_another(launch, tmp_path, capsys):
    launch("first", saving(2))
    with pytest.raises(SystemExit) as ended:
        launch("second", saving(4))
    assert ended.value.code == 1
    assert "holds checkpoints of run abc of 2026-01-01 10:00:00, up to iter_0000002" in capsys.readouterr().err
    assert not (tmp_path / "bucket/run" / NAME).exists()


def test_a_run_that_fails_uploads_what_it_has_saved(launch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        launch("first", saving(2, fails=RuntimeError("broken")))
    url = f"file://{tmp_path}/bucket/run"
    assert (tmp_path / "bucket/run/iter_0000002/manifest.json").is_file()
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"RuntimeError: broken; the same command with --load {url} continues from the last checkpoint" in last


def test_what_was_not_uploaded_is_named_and_uploaded_by_the_next_run(launch, tmp_path, capsys):
    def stopped(settings, context):
        save_checkpoint(settings.checkpoint.local(settings.checkpoint.save), 2)  # as if the network was down
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        launch("first", stopped)
    (local,) = (tmp_path / "first/remote").iterdir()
    assert f"the last checkpoint, iter_0000002, which it uploads from {local} first" in capsys.readouterr().err
    launch("first", saving(), "--load URL")
    assert (tmp_path / "bucket/run/iter_0000002/manifest.json").is_file()


def test_an_export_that_a_killed_run_was_exchanging_is_in_place_before_the_run_begins(tmp_path, monkeypatch, capsys):
    def start(folder):
        monkeypatch.setattr(launcher, "run", lambda settings, context: None)
        checked = validate(parse(minimal(f"--save-hf {folder} --output-dir {tmp_path}/out")))
        launcher.launch(replace(checked, inputs=Inputs()), exit_with_message)

    (tmp_path / ".replaced_hf").mkdir()
    start(tmp_path / "hf")
    assert (tmp_path / "hf").is_dir() and not (tmp_path / ".replaced_hf").exists()
    (tmp_path / "hf").rename(tmp_path / ".replaced_hf")
    (tmp_path / "hf").mkdir()

    def fails(path):
        raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", fails)
    with pytest.raises(SystemExit):
        start(tmp_path / "hf")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"miles train: error: --save-hf {tmp_path}/hf: a run was killed while it exchanged this ")
    assert f"{tmp_path}/.replaced_hf cannot be put into place (Permission denied)" in line


def test_an_export_goes_to_its_url(tmp_path):
    """``RunCheckpoints`` writes the export on this machine, and hands it over to be uploaded."""
    handed = []

    class Trainer:
        def export_hf(self, folder):
            (folder / "model.safetensors").write_text("weights")

        def upload_export(self, folder, url):
            handed.append((folder, url, sorted(path.name for path in folder.iterdir())))

        def settle_uploads(self):
            handed.append("settled")

    class Rollout:
        def save_tokenizer(self, folder):
            (folder / "config.json").write_text(json.dumps({}))

    flags = f"--save-hf memory://hub/m-{{iteration}} --output-dir {tmp_path}"
    section = validate(parse(minimal(flags))).settings.checkpoint
    timer = SimpleNamespace(phase=lambda name: nullcontext())
    actors = SimpleNamespace(rollout=Rollout(), trainer=Trainer(), timer=timer, give_gpus_to_trainer=lambda: None)
    RunCheckpoints(actors, section, {}, 1).end(3)
    (folder, url, files), settled = handed
    assert settled == "settled"
    assert url == "memory://hub/m-3" and tmp_path in folder.parents
    assert files == ["config.json", "model.safetensors"]


def test_a_launcher_that_takes_over_resumes_what_was_saved_meanwhile(tmp_path, monkeypatch):
    """The trainer outlives Ray's GCS, and has saved once more since the restart was decided."""
    loaded = []
    monkeypatch.setattr(launcher, "run", lambda settings, context: loaded.append(settings.checkpoint.load))
    flags = f"--rollout-shuffle --save {tmp_path}/ckpt --output-dir {tmp_path}/run --max-restarts 1"
    validated = validate(parse(minimal(flags)))
    save_checkpoint(tmp_path / "ckpt", 2)
    decided, _ = resuming(validated.settings)
    assert decided.checkpoint.load == str(tmp_path / "ckpt" / "iter_0000002")
    save_checkpoint(tmp_path / "ckpt", 4)
    with pytest.raises(SystemExit, match="0"):
        launcher.take_over(
            launcher.LauncherState(replace(validated, settings=decided), validated.settings.checkpoint, 0)
        )
    assert loaded == [str(tmp_path / "ckpt" / "iter_0000004")]


def test_a_launcher_that_took_over_says_what_to_leave_out_of_the_command(tmp_path, monkeypatch, capsys):
    """It resumes without ``--finetune``, and the user's command has that switch."""

    def fails(settings, context):
        raise RuntimeError("broken")

    monkeypatch.setattr(launcher, "run", fails)
    saved = tmp_path / "ckpt"
    save_checkpoint(saved, 4)
    flags = f"--save {saved} --load {tmp_path} --finetune --no-load-rng --output-dir {tmp_path}/out"
    words = minimal(f"--rollout-shuffle {flags}")
    validated = validate(parse(words))
    decided, _ = resuming(validated.settings)
    with pytest.raises(SystemExit, match="1"):
        launcher.take_over(
            launcher.LauncherState(replace(validated, settings=decided), validated.settings.checkpoint, 0)
        )
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"with --load {saved} and without --finetune and --no-load-rng continues from the last checkpoint" in last
