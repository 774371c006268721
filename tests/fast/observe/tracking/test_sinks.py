"""Sinks outside the output folder, against real receivers: a Prometheus client, MLflow's own store."""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import httpx
import psutil
import pytest

from miles.base.flags import FlagError
from miles.config.parser import parse
from miles.config.tracking import TrackingArguments
from miles.observe.run_files import RunHeader, SampleRecord
from miles.observe.sinks import MlflowSink, PrometheusSink, SampleTables, mlflow_name
from miles.observe.tracker import Tracker, check_services
from miles.types.metrics import Metric

HEADER = RunHeader("a run", {"tracking": {"wandb_key": "sesame", "output_dir": "out"}}, "words", "1/N", total_steps=4)


def test_prometheus_reads_the_newest_values_at_the_loopback_address_only():
    from prometheus_client.parser import text_string_to_metric_families

    sink = PrometheusSink(0)
    port = int(sink.url.split(":")[2].split("/")[0])
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    for step in (1, 2):
        sink.log(step, {"train/grad_norm": step / 4, "eval/x/accuracy": 0.5})
    answer = httpx.get(sink.url, trust_env=False).text
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer)
        for sample in family.samples
    }
    assert values == {
        ("miles_step",): 2.0,
        ("miles_metric", "train/grad_norm"): 0.5,
        ("miles_metric", "eval/x/accuracy"): 0.5,
    }
    with pytest.raises(ValueError, match=f"--prometheus-port {port}: cannot be served"):
        PrometheusSink(port)
    sink.close()
    PrometheusSink(port).close()


def test_mlflow_has_settings_without_secrets_and_every_step(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    sizes, log_batch = [], mlflow.MlflowClient.log_batch

    def sized(self, run, metrics=(), **more):
        sizes.append(len(metrics))
        log_batch(self, run, metrics=metrics, **more)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", sized)
    for metrics in (1, 1200):  # the second run finds the experiment
        sink = MlflowSink(TrackingArguments(use_mlflow=True, mlflow_tracking_uri=uri), HEADER)
        sink.log(1, {f"train/{1200 - number}": 0.25 for number in range(1, metrics + 1)})
        sink.log(2, {"train/1199": 0.5})
        sink.close()
    assert max(sizes) == 1000, "a server takes no more in one call"
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("miles").experiment_id])
    assert len(runs) == 2 and {run.info.status for run in runs} == {"FINISHED"}
    assert runs[0].data.params == {"tracking.wandb_key": "(hidden)", "tracking.output_dir": "out"}
    history = client.get_metric_history(runs[0].info.run_id, "train/1199")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]


SAMPLES = [
    SampleRecord(
        f"prompt {i}", f"answer {i}", i / 8, {"answer": i}, "completed", {"math": 1.0}, group=i // 4, tokens=["a"]
    )
    for i in range(8)
]


def test_tables_have_a_few_answers_of_iterations_that_are_spread_over_the_run():
    tables = SampleTables(TrackingArguments(report_samples=2), replace(HEADER, total_steps=250))
    by_step = [tables.rows(step, SAMPLES) for step in range(1, 251)]
    assert sum(map(bool, by_step)) == 84 and by_step[0] and not by_step[1]
    assert [row[:4] for row in by_step[3]] == [[4, 0, "prompt 0", "answer 0"], [4, 1, "prompt 4", "answer 4"]]
    assert by_step[0][1][4:] == ['{"answer": 4}', 0.5, '{"math": 1.0}', None, "completed", 1]
    assert all(len(row) == len(SampleTables.columns) for row in by_step[0])
    assert SampleTables(TrackingArguments(report_samples=0), HEADER).rows(1, SAMPLES) == []


def test_mlflow_has_a_table_of_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    sink = MlflowSink(TrackingArguments(use_mlflow=True, mlflow_tracking_uri=uri), HEADER)
    sink.log_samples(3, SAMPLES)
    sink.close()
    [path] = (tmp_path / "mlruns").glob("*/*/artifacts/samples/step_0000003.json")
    table = json.loads(path.read_text())
    assert table["columns"] == list(SampleTables.columns)
    assert [row[table["columns"].index("response")] for row in table["data"]] == [f"answer {i}" for i in (0, 2, 4, 6)]


def test_an_mlflow_server_that_does_not_answer_is_told_at_once(monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    section = TrackingArguments(use_mlflow=True, mlflow_tracking_uri=f"http://me:sesame@127.0.0.1:{port}")
    began = time.monotonic()
    with pytest.raises(ValueError, match="--use-mlflow: the MLflow server cannot be used .*Connection refused") as told:
        check_services(section)
    assert "sesame" not in str(told.value) and "\n" not in str(told.value)
    assert time.monotonic() - began < 30, "MLflow itself asks again for minutes"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_variables_that_are_set_while_an_mlflow_server_is_asked_stay(monkeypatch):
    monkeypatch.setenv("OF_ANOTHER_THREAD", "")
    monkeypatch.setattr(
        "mlflow.MlflowClient.get_experiment_by_name", lambda *_: os.environ.update(OF_ANOTHER_THREAD="set")
    )
    check_services(TrackingArguments(use_mlflow=True, mlflow_tracking_uri="http://127.0.0.1:9"))
    assert os.environ["OF_ANOTHER_THREAD"] == "set"


# Trackio and SwanLab have the same three calls. This package records them, with the thread that made each.
RECORDING = """
import json, os, threading
from types import SimpleNamespace

class Settings(SimpleNamespace):
    Terminal = SimpleNamespace
    mode = os.environ.get("SWANLAB_MODE", "online")
    api_key = os.environ.get("SWANLAB_API_KEY")

def record(call, *words, **named):
    in_main = threading.current_thread() is threading.main_thread()
    with open(os.environ["RECORD"], "a") as file:
        print(json.dumps([call, in_main, words, named], default=vars), file=file)

def init(**named):
    record("init", **named)
    if os.environ.get("FAILS"):
        raise RuntimeError("no server")
    return SimpleNamespace(log=lambda *a, **n: record("log", *a, **n), finish=lambda **n: record("finish", **n))

def login(api_key):
    if api_key != "right":
        raise ValueError(f"the key {api_key} is wrong\\nsorry")
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    for name in ("trackio", "swanlab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(RECORDING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    for name in ("SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    for name in ("trackio", "swanlab"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "more", "ends"),
    [
        ("trackio", {}, [{}, {}, {}]),
        (
            "swanlab",
            {"log_dir": "OUT/swanlog", "settings": {"terminal": {"proxy_type": "none"}}},
            [{"state": "success"}, {"state": "crashed", "error": "the run failed"}, {"state": "aborted"}],
        ),
    ],
)
def test_a_service_has_settings_without_secrets_every_step_and_the_end_of_the_run(
    name, more, ends, recorded, tmp_path, monkeypatch
):
    monkeypatch.setenv("SWANLAB_API_KEY", "right")
    tracking = TrackingArguments(report_to=name, report_project="mine", output_dir=str(tmp_path / "out"))
    for error in (None, RuntimeError("full"), KeyboardInterrupt()):
        check_services(tracking)
        with suppress(RuntimeError, KeyboardInterrupt), Tracker(tracking, HEADER) as tracker:
            for step in (1, 2):
                tracker.log(step, {"train/loss": step / 4, "eval/x/pass@1": Metric(1, 4)})
            if error is not None:
                raise error
    calls = recorded()
    assert not any(in_main for _, in_main, *_ in calls), "SwanLab would take Ctrl-C from the run"
    more = json.loads(json.dumps(more).replace("OUT", str(tmp_path / "out")))
    for number, end in enumerate(ends):
        (_, _, _, begun), *steps, (last, _, _, finished) = calls[4 * number : 4 * number + 4]
        assert begun.pop("name").startswith("out-")
        config = {"tracking": {"wandb_key": "(hidden)", "output_dir": "out"}}
        assert begun == {"project": "mine", "config": config} | more
        assert [(words, named) for _, _, words, named in steps] == [
            ([{"train/loss": step / 4, "eval/x/pass@1": 0.25}], {"step": step}) for step in (1, 2)
        ]
        assert (last, finished) == ("finish", end)


def test_a_service_that_fails_is_one_note(recorded, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAILS", "1")
    with Tracker(TrackingArguments(report_to="trackio", output_dir=str(tmp_path / "out")), HEADER) as tracker:
        tracker.log(1, {"train/loss": 1.0})
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: --report-to trackio")]
    assert notes == ["note: --report-to trackio: not all was recorded (RuntimeError: no server)"]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "--report-to swanlab: no API key; set SWANLAB_API_KEY"),
        ({"SWANLAB_API_KEY": "sesame"}, "SwanLab cannot be used (the key"),
        ({"SWANLAB_MODE": "offline"}, None),
        ({"SWANLAB_API_KEY": "right"}, None),
    ],
)
def test_the_key_of_swanlab_is_checked_before_the_run(environ, told, recorded, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    tracking = TrackingArguments(report_to="swanlab")
    if told is None:
        check_services(tracking)
        return
    with pytest.raises(ValueError) as refused:
        check_services(tracking)
    text = str(refused.value)
    assert told in text and "SWANLAB_MODE=offline" in text and "sesame" not in text and "\n" not in text


def test_names_of_metrics_are_such_as_mlflow_takes():
    assert mlflow_name("eval/gsm8k/pass@1") == "eval/gsm8k/pass_1"
    assert mlflow_name("train/kl (k3) [%]") == "train/kl _k3_ ___"
    assert mlflow_name("time/step.a-b: c_1") == "time/step.a-b: c_1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prometheus-port", "70000"], "--prometheus-port 70000: must be in [0, 65535]"),
        (["--use-wandb", "--wandb-run-id", "a/b"], "--wandb-run-id a/b: is no id of a W&B run"),
        (["--notify-url", "sesame"], "--notify-url: is not an address of the web"),
        (["--wait-timeout", "-1"], "--wait-timeout -1.0: must be a finite number of at least 0"),
    ],
)
def test_flags_are_checked(flags, message):
    from miles.config.validate import validate

    with pytest.raises((FlagError, SystemExit)) as refused:
        validate(parse(flags))
    if isinstance(refused.value, FlagError):
        assert any(each.startswith(message) for each in refused.value.messages), refused.value.messages
        assert "sesame" not in str(refused.value)


def test_a_used_port_is_reported_before_a_trainer_starts(monkeypatch, tmp_path):
    from miles.run import train_actor
    from miles.run.failure_files import FailureFiles
    from miles.run.launcher import train

    monkeypatch.setattr(train_actor.TrainDriver, "__init__", lambda *words: pytest.fail("the trainer started"))
    context = SimpleNamespace(stop=None, files=FailureFiles(tmp_path, []))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = parse(["--prometheus-port", str(port), "--output-dir", str(tmp_path)])
        with pytest.raises(ValueError, match=f"--prometheus-port {port}: cannot be served"):
            train(settings, SimpleNamespace(device="cpu"), context)
