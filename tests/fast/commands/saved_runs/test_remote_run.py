"""A run that saves to a URL is listed, opened and exported from there, on a machine that has none of its files."""

import argparse
import json
from dataclasses import replace

import pytest

from miles.base.locks import RemoteLock
from miles.base.storage import RemoteFolder
from miles.base.text import InputError
from miles.commands import runs
from miles.commands.saved_runs.run import RunState, SavedRun, on_this_machine, run_folder, runs_at
from miles.run.remote_checkpoints import uploading
from miles.training.checkpoint_files import publish, staging
from tests.fast.commands.saved_runs.test_run import write_run


@pytest.fixture
def url(tmp_path):
    """Save a run of 5 iterations to a URL, after 2 and 5 of them, and remove its files from this machine."""
    url = f"file://{tmp_path}/bucket/runs/a"
    out = tmp_path / "out"
    settings = write_run(out, 5, more=f"--save {url}")
    with uploading(settings, None) as uploads:
        for done in (2, 5):
            root = settings.checkpoint.local(url)
            (staging(root, done) / "weights").write_text(f"weights {done}")
            uploads.add_checkpoint(publish(root, done))
        uploads.settle()
    out.rename(tmp_path / "gone")
    return url


def test_a_run_is_opened_by_its_url(url, tmp_path):
    run = SavedRun(run_folder(url))
    assert run.state is RunState.FINISHED and run.iterations == 5
    assert [(c.iterations, c.is_complete) for c in run.checkpoints()] == [(2, True), (5, True)]
    with on_this_machine(run.settings.checkpoint, run.checkpoint(4).folder) as folder:
        assert (folder / "weights").read_text() == "weights 2"
    assert not folder.exists()
    with pytest.raises(InputError, match=f"--step 6: no checkpoint .* in {url}; give one of 4, 10"):
        run.checkpoint(6)
    with RemoteLock(RemoteFolder(url), "--save x"):
        assert SavedRun(run_folder(url)).state is RunState.RUNNING


def test_a_damaged_checkpoint_is_an_error_of_one_sentence(url, tmp_path):
    run = SavedRun(run_folder(url))
    checkpoint = run.checkpoint(4)
    (tmp_path / "bucket/runs/a/iter_0000002/manifest.json").rename(tmp_path / "bucket/runs/a/iter_0000002/.incomplete")
    with (
        pytest.raises(InputError, match=f"{url}: iter_0000002 is damaged: its upload was not finished"),
        on_this_machine(run.settings.checkpoint, checkpoint.folder),
    ):
        raise AssertionError("there is nothing to use")
    assert [c.is_complete for c in SavedRun(run_folder(url)).checkpoints()] == [False, True]


def test_runs_lists_a_url(url, tmp_path, capsys):
    above = url.rpartition("/")[0]
    assert [address for address, _ in runs_at(above)] == [url]
    assert runs.main([above, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["run"], entry["state"], entry["iterations"]) == (url, "finished", 5)
    assert runs.main([above]) == 0
    assert f"{url}  finished  5/5" in capsys.readouterr().out
    assert runs.main([f"{above}/nothing"]) == 0


def test_a_url_without_a_run_is_refused(url):
    with pytest.raises(argparse.ArgumentTypeError, match="runs: holds no run.json; give the --save of a run"):
        run_folder(url.rpartition("/")[0])
    with pytest.raises(argparse.ArgumentTypeError, match="does not know"):
        run_folder("nothing://a/b")


def test_a_local_checkpoint_is_used_in_place(tmp_path):
    settings = write_run(tmp_path / "run", 5, saved=[5])
    folder = SavedRun(tmp_path / "run").checkpoint(None).folder
    with on_this_machine(replace(settings.checkpoint), folder) as used:
        assert used == folder
