"""Weights & Biases, offline: its files are on disk, and no server is asked."""

import json

from miles.arguments.tracking import TrackingArguments
from miles.tracking.run_files import SampleRecord
from miles.tracking.run_header import RunHeader
from miles.tracking.sinks import SampleTables
from miles.tracking.wandb_sink import WandbSink

HEADER = RunHeader("a run", {"tracking": {"wandb_key": "sesame", "output_dir": "out"}}, "words", "1/N", total_steps=4)
SAMPLES = [SampleRecord(f"prompt {i}", f"answer {i}", i / 8, {"answer": i}, "completed") for i in range(8)]
    SampleRecord(f"prompt {i}", f"answer {i}", i / 8, {"answer": i}, "completed", group=i // 4) for i in range(8)
]


def test_wandb_writes_a_table_of_answers_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(TrackingArguments(use_wandb=True, output_dir=str(tmp_path)), HEADER)
    sink.log(3, {"train/loss": 0.5})
    sink.log_samples(3, SAMPLES)
    sink.close()
    [path] = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == list(SampleTables.columns)
    assert [row[table["columns"].index("response")] for row in table["data"]] == [f"answer {i}" for i in (0, 2, 4, 6)]


def test_wandb_has_the_run_that_the_flag_names(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(TrackingArguments(use_wandb=True, output_dir=str(tmp_path), wandb_run_id="mine-7"), HEADER)
    found = sink._run.id, sink._run.settings.resume
    sink.close()
    assert found == ("mine-7", "allow")
    assert list(tmp_path.glob("wandb/offline-run-*-mine-7/run-mine-7.wandb"))
