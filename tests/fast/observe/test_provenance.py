"""run.json states the settings, code and data that a run started with, and run.yaml repeats the run."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path

from miles.compat.border import read_command
from miles.config.checkpoint import CheckpointArguments
from miles.config.evaluation import EvaluationArguments
from miles.config.run_file import run_config
from miles.config.settings import Settings
from miles.config.tracking import TrackingArguments
from miles.observe import provenance as module
from miles.observe.provenance import git_state, in_words, provenance
from miles.observe.run_files import RunHeader
from miles.observe.tracker import Tracker
from miles.run.launcher import _config
from miles.tasks.data.settings import DataArguments


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_local_data_has_a_checksum_and_other_sources_have_none(tmp_path: Path, monkeypatch) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("one\n")
    test.write_bytes(b"two" * 1000)
    monkeypatch.setattr(module, "HASHED_BYTES", 100)
    settings = Settings(
        data=DataArguments(prompt_data=str(train)),
        evaluation=EvaluationArguments(eval_prompt_data=("a", str(test), "b", "some/data", "c", str(test))),
    )
    record = provenance(settings)
    first, second, third = record["data"]
    assert first == {"source": str(train), "bytes": 4, "sha256": hashlib.sha256(b"one\n").hexdigest()}
    assert second["sha256"] == hashlib.sha256((b"two" * 1000)[:100]).hexdigest()
    assert (second["bytes"], second["sha256_of_first_bytes"]) == (3000, 100)
    assert third == {"source": "some/data"}
    assert record["seeds"] == {"seed": 1234, "rollout_seed": 42}
    assert record["versions"]["python"] and record["machine"]["cores"] > 0
    assert f"torch {record['versions']['torch']}" in in_words(record)[0]


def test_git_state_is_that_of_the_checkout(tmp_path: Path, monkeypatch) -> None:
    assert git_state(tmp_path / "none") is None
    git(tmp_path, "init", "-b", "trunk")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "one")
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40
    assert (state["branch"], state["has_changes"]) == ("trunk", False)
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == state | {"has_changes": True}
    monkeypatch.setattr(module, "_git", lambda folder, name, *words: None if name == "status" else "1")
    assert git_state(tmp_path)["has_changes"] is None, "git did not answer in time"


def test_a_run_folder_repeats_its_run(tmp_path: Path) -> None:
    settings = Settings(
        data=DataArguments(prompt_data="https://me:sesame@host/data"), tracking=TrackingArguments(str(tmp_path))
    )
    record = provenance(settings)
    header = RunHeader.from_sections("miles", settings, "words", "formula", 7, record)
    for reward in (0.0, 1.0):
        with Tracker(settings.tracking, header, config=run_config(settings, in_words(record))) as tracker:
            tracker.log(0, {"rollout/reward": reward})
    assert RunHeader.load(tmp_path).provenance["versions"] == record["versions"]
    assert json.loads((tmp_path / "earlier-1" / "run.json").read_text())["provenance"]["seeds"] == record["seeds"]
    assert (tmp_path / "earlier-1" / "run.yaml").is_file()
    assert "sesame" not in (tmp_path / "run.yaml").read_text() + (tmp_path / "run.json").read_text()
    command = read_command(["--config", str(tmp_path / "run.yaml"), "prompt_data=https://me:sesame@host/data"])
    assert command.settings.data == settings.data and command.settings.tracking == settings.tracking


def test_the_file_of_a_run_says_how_to_repeat_it_from_the_beginning() -> None:
    record = provenance(Settings())

    def text(**flags: str) -> str:
        return _config(replace(Settings(), checkpoint=CheckpointArguments(**flags)), record, flags)

    assert "/run.yaml repeats this run;" in text()
    assert "/run.yaml --start-over repeats this run;" in text(save="a")
    assert "/run.yaml load=null --start-over repeats this run;" in text(save="a", load="a")
    assert "/run.yaml --start-over repeats this run;" in text(save="a", load="another/run")
