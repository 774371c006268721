"""Weights & Biases without its servers: offline, disabled, or with a server that refuses everything."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import wandb

from miles.base.text import InputError
from miles.config.checkpoint import CheckpointArguments
from miles.config.tracking import TrackingArguments
from miles.observe.run_files import RunHeader, SampleRecord
from miles.observe.sinks import SampleTables, WandbSink, log_in
from miles.run.checkpoints import saved_wandb_run
from miles.training.checkpoint_files import write_run_state

HEADER = RunHeader("a run", {"tracking": {"wandb_key": "sesame", "output_dir": "out"}}, "words", "1/N", total_steps=4)
SAMPLES = [SampleRecord(f"prompt {i}", f"answer {i}", i / 8, {"answer": i}, "completed") for i in range(8)]


@pytest.fixture(autouse=True)
def no_key_and_no_settings(monkeypatch, tmp_path):
    """Nothing of the user's own W&B is read or written."""
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    wandb.teardown()
    yield
    wandb.teardown()


def services() -> list[psutil.Process]:
    """Return W&B's own processes that this one has started."""
    return [child for child in psutil.Process().children() if child.name().startswith("wandb")]


def tracking_of(folder: Path, **flags) -> TrackingArguments:
    return TrackingArguments(use_wandb=True, output_dir=str(folder), **flags)


def test_wandb_writes_a_table_of_answers_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(tracking_of(tmp_path, wandb_run_id="mine-7"), HEADER, "of-the-checkpoint")
    assert (sink.run_id, sink._run.settings.resume) == ("mine-7", "allow"), "the flag names the run"
    sink.log(3, {"train/loss": 0.5})
    sink.log_samples(3, SAMPLES)
    assert services()
    sink.close()
    assert not services()
    [path] = tmp_path.glob("wandb/offline-run-*-mine-7/files/media/table/samples_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == list(SampleTables.columns)
    assert [row[table["columns"].index("response")] for row in table["data"]] == [f"answer {i}" for i in (0, 2, 4, 6)]


def test_mode_and_folder_are_those_of_the_flags_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "unused"))
    tracking = tracking_of(tmp_path / "out", wandb_mode="offline", wandb_dir=str(tmp_path / "new" / "elsewhere"))
    log_in(tracking)
    ids = []
    for earlier in (None, "abc123"):
        sink = WandbSink(tracking, HEADER, earlier)
        ids.append(sink.run_id)
        sink.close()
    assert ids[0] not in (None, "abc123") and ids[1] == "abc123"
    assert {path.name.split("-")[-1] for path in tmp_path.glob("new/elsewhere/wandb/offline-run-*")} == {*ids}
    assert not (tmp_path / "unused").exists() and not (tmp_path / "out").exists()
    assert capsys.readouterr().out.count("note: continues the W&B run abc123 of the checkpoint in --load") == 1


def test_disabled_wandb_needs_no_key_and_records_nothing(tmp_path):
    tracking = tracking_of(tmp_path / "out", wandb_mode="disabled", wandb_dir=str(tmp_path / "new"))
    log_in(tracking)
    sink = WandbSink(tracking, HEADER, "abc123")
    sink.log(1, {"train/loss": 0.5})
    sink.close()
    assert sink.run_id is None and not list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize(
    ("flag", "variable", "earlier", "named"),
    [
        (None, None, None, None),
        (None, None, "old", "old"),
        (None, "environment", "old", None),  # W&B itself reads the variable
        ("mine", "environment", "old", "mine"),
    ],
)
def test_a_flag_or_a_variable_wins_over_the_run_of_the_checkpoint(
    tmp_path, monkeypatch, flag, variable, earlier, named
):
    received = {}
    if variable is not None:
        monkeypatch.setenv("WANDB_RUN_ID", variable)
    run = SimpleNamespace(disabled=False, id=named)
    monkeypatch.setattr(wandb, "init", lambda **arguments: received.update(arguments) or run)
    WandbSink(tracking_of(tmp_path, wandb_run_id=flag, disable_wandb_random_suffix=True), HEADER, earlier)
    assert (received["id"], received["resume"]) == (named, None if named is None else "allow")
    assert received["name"] == (None if named == "old" else "a run")


def test_steps_that_wandb_has_already_are_named(tmp_path, monkeypatch, capsys):
    run = SimpleNamespace(disabled=False, id="old", starting_step=9)
    monkeypatch.setattr(wandb, "init", lambda **arguments: run)
    sink = WandbSink(tracking_of(tmp_path), HEADER, "old")
    capsys.readouterr()
    sink.resume(9)
    assert capsys.readouterr().out == ""
    sink.resume(7)
    assert "note: the W&B run old has steps up to 8, and takes none of 7 to 8 again" in capsys.readouterr().out


def test_a_checkpoint_says_which_wandb_run_is_continued(tmp_path):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    load = CheckpointArguments(load=str(tmp_path))
    for launcher, expected in (({"rollouts_done": 3, "wandb_run": "old"}, "old"), ({"rollouts_done": 3}, None)):
        write_run_state(folder, "fsdp", launcher, {"steps_done": 3})
        assert saved_wandb_run(load) == expected
    write_run_state(folder, "fsdp", {"rollouts_done": 3, "wandb_run": "old"}, {"steps_done": 3})
    assert saved_wandb_run(CheckpointArguments(load=str(tmp_path), finetune=True)) is None
    assert saved_wandb_run(CheckpointArguments()) is None
    assert saved_wandb_run(CheckpointArguments(load=str(tmp_path / "new"))) is None


class Refusing(BaseHTTPRequestHandler):
    """Refuses every key."""

    def do_POST(self) -> None:
        self.send_error(401)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def refusing_server():
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_wandb_refuses_is_one_sentence_before_anything_starts(tmp_path, refusing_server):
    (tmp_path / "file").write_text("")
    faults = [
        ({}, InputError, ["--use-wandb: W&B cannot be used (No API key configured", "WANDB_API_KEY or --wandb-key"]),
        ({"wandb_key": "short"}, ValueError, ["(API key must have", "--wandb-mode offline"]),
        ({"wandb_key": "a" * 40, "wandb_host": "nonsense"}, InputError, ["valid URL", "--wandb-host"]),
        ({"wandb_key": "a" * 40, "wandb_host": refusing_server}, ValueError, [refusing_server, "--wandb-host"]),
        ({"wandb_dir": str(tmp_path / "file")}, InputError, [f"--wandb-dir {tmp_path}/file: W&B cannot write there"]),
        (
            {"wandb_dir": "/proc/nothing", "wandb_mode": "offline"},
            InputError,
            ["--wandb-dir /proc/nothing: W&B cannot"],
        ),
    ]
    for flags, kind, words in faults:
        with pytest.raises(ValueError) as refused:
            log_in(tracking_of(tmp_path, **flags))
        text = str(refused.value)
        assert type(refused.value) is kind and all(word in text for word in words), text
        assert "\n" not in text and "aaaa" not in text
    log_in(TrackingArguments(wandb_dir="/proc/no"))  # without --use-wandb nothing is asked


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_one_sentence(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # refuses connections: nothing listens
        host = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"^--use-wandb: W&B cannot be used \(.*{host}.*the network"):
            log_in(tracking_of(tmp_path, wandb_key="a" * 40, wandb_host=host))
