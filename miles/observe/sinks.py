"""Sinks of metrics: TensorBoard, MLflow, Trackio, SwanLab, Prometheus, W&B; and notifications of a run's end."""

from __future__ import annotations

import html
import itertools
import json
import os
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import psutil

from miles.base.connections import BoundedServer
from miles.base.processes import kill_all
from miles.base.secrets import hide_in_text
from miles.base.text import InputError, one_line
from miles.config.tracking import TrackingArguments
from miles.observe.run_files import METRICS, RunHeader, SampleRecord

MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # that MLflow takes in one call
MLFLOW_VALUE = 500  # characters of a parameter
MOST_TABLES = 100  # of answers in a run, spread over it
CAUSE_LENGTH = 300  # characters of a service's own message
CLOSE_SECONDS = 60.0  # for the calls still to be sent at the end of a run
FAILED_SECONDS = 5.0  # for the process of a service that has failed

_MLFLOW_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_event_files = itertools.count()  # of this process: TensorBoard orders them by time, then by this

Status = Literal["FINISHED", "FAILED", "KILLED"]  # how a run ended


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Flush and close; no call follows."""


class TensorBoardSink:
    """Writes event files into ``folder``; TensorBoard hides older events from ``resume_step`` on.

    A file that has a quarter of ``max_bytes`` is followed by another, for which the oldest ones are removed if need be.
    Every method raises ``OSError`` if a file cannot be written.

    Args:
        folder: The folder.
        resume_step: The first step of a run that resumes.
        tables: Chooses the answers that are shown as text; None shows none.
        max_bytes: The bound of the folder.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int | None = None,
        tables: SampleTables | None = None,
        max_bytes: int = sys.maxsize,
    ) -> None:
        # Lazily: slow to import, and only the launcher writes. Not torch's SummaryWriter, which needs torch.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._tables = tables
        self._text_tab = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        one = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        self._text = partial(TensorProto, dtype=DT_STRING, tensor_shape=one)
        # Not EventFileWriter either: its thread prints a traceback if the disk is full.
        self._record_writer = RecordWriter
        self._folder = folder
        self._max_bytes = max_bytes
        self._noted = False
        folder.mkdir(parents=True, exist_ok=True)
        self._open()
        if resume_step is not None:  # TensorBoard takes a start of this version as the end of later steps
            start = SessionLog(status=SessionLog.START)
            self._add(Event(step=resume_step, file_version="brain.Event:2"))
            self._add(Event(wall_time=time.time(), step=resume_step, session_log=start))
        self._writer.flush()

    def _open(self) -> None:
        """Begin the next file."""
        self._make_room()
        unique = f"{os.getpid()}.{next(_event_files):06d}"
        path = self._folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{unique}"
        self._file = path.open("wb")
        self._writer = self._record_writer(self._file)
        self._add(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def _make_room(self) -> None:
        """Remove the oldest files until a quarter of the bound is free. The first time, say so."""
        files = sorted(self._folder.glob("events.out.tfevents.*"))
        while sum(file.stat().st_size for file in files) > 0.75 * self._max_bytes:
            files.pop(0).unlink()
            if not self._noted:
                print(
                    f"note: {self._folder} has reached --metrics-max-mb, so its oldest steps are removed; "
                    f"{METRICS} has steps of the whole run",
                    file=sys.stderr,
                )
            self._noted = True

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _end_record(self) -> None:
        """Flush what was added, and begin another file if this one is long enough."""
        self._writer.flush()
        if self._file.tell() >= 0.25 * self._max_bytes:
            self._writer.close()
            self._open()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write every value as its own scalar name."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._end_record()

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Write some answers of an iteration as a table, in the format of TensorBoard's tab Text."""
        rows = [] if self._tables is None else self._tables.rows(step, samples)
        if not rows:
            return
        tensor = self._text(string_val=[_markdown_table(rows).encode(errors="backslashreplace")])
        value = self._summary.Value(tag="samples", metadata=self._text_tab, tensor=tensor)
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))
        self._end_record()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class SampleTables:
    """Chooses the tables of answers of a run: ``--report-samples`` answers of at most ``MOST_TABLES`` iterations.

    Args:
        tracking: The flags.
        header: Knows how long the run is.
    """

    columns = (
        "step",
        "group",
        "prompt",
        "response",
        "label",
        "reward",
        "reward_parts",
        "advantage",
        "status",
        "tokens",
    )

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        self._samples = tracking.report_samples
        self._every = max(1, -(-header.total_steps // MOST_TABLES))
        self._seen = 0

    def rows(self, step: int, samples: Sequence[SampleRecord]) -> list[list[Any]]:
        """Return the rows of the next iteration, spread over its prompts; none if it gets no table."""
        self._seen += 1
        if (self._seen - 1) % self._every:
            return []
        count = min(self._samples, len(samples))
        return [_table_row(step, samples[number * len(samples) // count]) for number in range(count)]


def _markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    lines = [SampleTables.columns, ["---"] * len(SampleTables.columns), *rows]
    return "\n".join(f"| {' | '.join(map(_markdown_cell, line))} |" for line in lines)


def _markdown_cell(value: Any) -> str:
    """Return a value as one cell that shows it unchanged: no character of it is Markdown or HTML."""
    text = "" if value is None else html.escape(str(value), quote=False)
    text = re.sub(r"([\\|`*_{}\[\]#!~])", r"\\\1", text)
    return re.sub(r"\r?\n|\r", "<br>", text)


def _table_row(step: int, sample: SampleRecord) -> list[Any]:
    label = sample.label
    if label is not None and not isinstance(label, str):
        label = json.dumps(label, default=str)
    parts = None if sample.reward_parts is None else json.dumps(sample.reward_parts)
    tokens = None if sample.tokens is None else len(sample.tokens)
    about = [label, sample.reward, parts, sample.advantage, sample.status, tokens]
    return [step, sample.group, sample.prompt, sample.response, *about]


class MlflowSink:
    """One run of MLflow. A thread sends the steps, so that a server that does not answer stops nothing."""

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        import mlflow

        self.status: Status = "FINISHED"
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking.mlflow_tracking_uri)
        name = tracking.mlflow_experiment
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=header.title).info.run_id
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param
        sections = header.public_settings().items()
        params = [(f"{section}.{name}", str(value)) for section, values in sections for name, value in values.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            batch = [self._param(name, value[:MLFLOW_VALUE]) for name, value in params[start : start + MLFLOW_PARAMS]]
            self._client.log_batch(self._run, params=batch)
        self._tables = SampleTables(tracking, header)
        self._calls = OrderedCalls("--use-mlflow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Have one step sent."""
        now = int(time.time() * 1000)
        metrics = [self._metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            batch = metrics[start : start + MLFLOW_METRICS]
            self._calls.add(partial(self._client.log_batch, self._run, metrics=batch))

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Have some answers of an iteration sent, as a file in the format of MLflow's tables."""
        if rows := self._tables.rows(step, samples):
            table = {"columns": list(SampleTables.columns), "data": rows}
            self._calls.add(partial(self._client.log_dict, self._run, table, f"samples/step_{step:07d}.json"))

    def close(self) -> None:
        """End the run, and wait for that up to ``CLOSE_SECONDS``."""
        self._calls.add(lambda: self._client.set_terminated(self._run, self.status))
        self._calls.close()


def check_mlflow(tracking: TrackingArguments) -> None:
    """Ask the MLflow server of a run, before anything of it starts; nothing without one.

    MLflow itself would ask again for minutes, and the run would fail once its models are loaded.

    Raises:
        ValueError: The server does not answer, or refuses the question.
    """
    if not tracking.use_mlflow:
        return
    import mlflow

    uri = tracking.mlflow_tracking_uri or mlflow.get_tracking_uri()
    if not uri.startswith(("http://", "https://")):
        return
    what_to_do = "check --mlflow-tracking-uri (MLFLOW_TRACKING_URI) and the network, or leave --use-mlflow out"
    retries = os.environ.get(_MLFLOW_RETRIES)
    os.environ[_MLFLOW_RETRIES] = retries or "0"
    try:
        with _failing_with("--use-mlflow: the MLflow server", [uri], what_to_do):
            mlflow.MlflowClient(tracking_uri=uri).get_experiment_by_name(tracking.mlflow_experiment)
    finally:
        if retries is None:
            del os.environ[_MLFLOW_RETRIES]


@contextmanager
def _failing_with(service: str, secrets: Collection[str], what_to_do: str) -> Iterator[None]:
    """Turn whatever a service raises into one sentence, a ``ValueError`` without ``secrets``."""
    try:
        yield
    except Exception as error:
        cause = one_line(hide_in_text(str(error), secrets), 2 * CAUSE_LENGTH).strip().rstrip(".")
        raise ValueError(f"{service} cannot be used ({cause}); {what_to_do}") from error


class ServiceSink:
    """One run of Trackio or SwanLab: both have ``init``, and ``log`` and ``finish`` of the run that it returns.

    A thread makes all calls, so that a service that does not answer stops nothing. Begun in the main thread, SwanLab
    would take Ctrl-C for itself.
    """

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        self.status: Status = "FINISHED"
        self._run: Any = None
        name = f"{Path(tracking.output_dir).name}-{secrets.token_hex(3)}"
        arguments = {"project": tracking.report_project, "name": name, "config": header.public_settings()}
        self._begin, self._ends = _trackio() if tracking.report_to == "trackio" else _swanlab(tracking.output_dir)
        self._calls = OrderedCalls(f"--report-to {tracking.report_to}")
        self._calls.add(partial(self._start, arguments))

    def _start(self, arguments: dict[str, Any]) -> None:
        self._run = self._begin(**arguments)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Have one step sent."""
        self._calls.add(lambda: self._run.log(dict(values), step=step))

    def close(self) -> None:
        """End the run, and wait for that up to ``CLOSE_SECONDS``."""
        self._calls.add(lambda: self._run.finish(**self._ends[self.status]))
        self._calls.close()


# The function that begins a run of a service, and what its ``finish`` takes for each end of a run.
_Service: TypeAlias = tuple[Callable[..., Any], Mapping[Status, Mapping[str, str]]]


def _trackio() -> _Service:
    import trackio

    return trackio.init, {"FINISHED": {}, "FAILED": {}, "KILLED": {}}


def _swanlab(output_dir: str) -> _Service:
    import swanlab

    quiet = swanlab.Settings(terminal=swanlab.Settings.Terminal(proxy_type="none"))  # or it sends what is printed
    begin = partial(swanlab.init, log_dir=f"{output_dir}/swanlog", settings=quiet)
    failed = {"state": "crashed", "error": "the run failed"}
    return begin, {"FINISHED": {"state": "success"}, "FAILED": failed, "KILLED": {"state": "aborted"}}


def check_swanlab(tracking: TrackingArguments) -> None:
    """Check SwanLab's key before anything of a run starts. SwanLab itself would ask for one in the middle of it.

    Raises:
        InputError: There is no key.
        ValueError: The server does not answer, or refuses the key.
    """
    if tracking.report_to != "swanlab":
        return
    import swanlab

    settings = swanlab.Settings()
    offline = "or set SWANLAB_MODE=offline, which writes files for swanlab sync"
    if settings.mode != "online":
        return
    if settings.api_key is None:
        raise InputError(f"--report-to swanlab: no API key; set SWANLAB_API_KEY, run swanlab login, {offline}")
    what_to_do = f"check SWANLAB_API_KEY and the network, {offline}"
    with _failing_with("--report-to swanlab: SwanLab", [settings.api_key], what_to_do):
        swanlab.login(api_key=settings.api_key)


def mlflow_name(name: str) -> str:
    """Return the name of a metric with underscores for the characters that MLflow refuses, as in ``pass@1``."""
    return re.sub(r"[^\w\-. :/]", "_", name)


class OrderedCalls:
    """Calls that a thread makes in order. The first that fails is a note; the others are still made.

    Args:
        flag: Begins the note.
    """

    def __init__(self, flag: str) -> None:
        self._flag = flag
        self._failed = False
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=flag, daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], object]) -> None:
        """Have the thread make a call."""
        self._waiting.put(call)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for the calls, for so many seconds at most."""
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            print(f"note: {self._flag}: not everything was sent within {seconds:g} s", file=sys.stderr)

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:
                if not self._failed:
                    print(failure_note(self._flag, error), file=sys.stderr)
                self._failed = True


def failure_note(flag: str, error: Exception) -> str:
    """Return the note about a service that failed during a run."""
    return f"note: {flag}: not all was recorded ({type(error).__name__}: {error})"


class _MetricsServer(BoundedServer, WSGIServer):
    pass


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the run."""


@contextmanager
def _serving(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"--prometheus-port {port}: cannot be served ({error.strerror}); give another port, or 0 for any"
        ) from error


def check_port(port: int) -> None:
    """Raise ``InputError`` if ``PrometheusSink`` cannot serve on ``port``."""
    with _serving(port), socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the sink's server
        server.bind(("127.0.0.1", port))


class PrometheusSink:
    """Serve the newest value of each metric on a port of the loopback address, for Prometheus.

    ``miles_metric{name="train/grad_norm"}`` has the value, ``miles_step`` the newest step. Raises ``ValueError`` if the
    port is in use.
    """

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

        self._closed = False
        registry = CollectorRegistry()
        self._metric = Gauge("miles_metric", "The newest value of a metric of the run.", ["name"], registry=registry)
        self._step = Gauge("miles_step", "The newest optimizer step.", registry=registry)
        with _serving(port):
            self._server = make_server("127.0.0.1", port, make_wsgi_app(registry), _MetricsServer, _QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()
        print(f"metrics for Prometheus: {self.url}")

    @property
    def url(self) -> str:
        """The address of the metrics."""
        return f"http://127.0.0.1:{self._server.server_port}/metrics"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the values."""
        self._step.set(step)
        for name, value in values.items():
            self._metric.labels(name).set(value)

    def close(self) -> None:
        """Stop serving. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def check_packages(tracking: TrackingArguments) -> None:
    """Check, before anything starts, that the packages of the sinks are installed.

    Raises:
        InputError: If not; names the flags and the extras.
    """
    wanted = {
        "wandb": ("--use-wandb", tracking.use_wandb),
        "mlflow": ("--use-mlflow", tracking.use_mlflow),
        "prometheus": ("--prometheus-port", tracking.prometheus_port is not None),
        **{name: (f"--report-to {name}", tracking.report_to == name) for name in ("trackio", "swanlab")},
    }
    modules = {"prometheus": "prometheus_client"}
    missing = [
        f"{flag}: the package {modules.get(extra, extra)} is not installed; install the extra with "
        f"pip install 'miles[{extra}]', or leave the flag out (metrics.jsonl and TensorBoard are written either way)"
        for extra, (flag, is_on) in wanted.items()
        if is_on and find_spec(modules.get(extra, extra)) is None
    ]
    if missing:
        raise InputError("; ".join(missing))


# Log to Weights & Biases.
#
# ``log_in`` comes before anything of the run starts, and finds what W&B would refuse: the key, the server, the folder.
# A run that resumes continues the W&B run of its checkpoint (run/checkpoints.py).


def log_in(tracking: TrackingArguments) -> None:
    """Check the folder of W&B's files and, unless nothing is sent, log in to the server; nothing without --use-wandb.

    Raises:
        InputError: The folder cannot be written, or there is no key.
        ValueError: The server does not answer, or refuses the key.
    """
    if not tracking.use_wandb:
        return
    mode = tracking.wandb_mode or os.environ.get("WANDB_MODE", "online")
    if mode != "disabled":
        _check_folder(*_folder(tracking))
    if mode != "online":
        return
    import wandb

    with _failing_in_one_sentence(tracking):
        if (wandb_mode := _wandb_mode(tracking)) is not None:  # WANDB_MODE may say otherwise
            wandb.setup(wandb.Settings(mode=wandb_mode))
        wandb.login(key=tracking.wandb_key, host=tracking.wandb_host)
    _end_service()


class WandbSink:
    """One W&B run.

    Args:
        tracking: The flags.
        header: The facts of the run.
        earlier: The id of the W&B run that a run which resumes continues, unless ``--wandb-run-id`` or WANDB_RUN_ID
            names another; None begins a new one.

    Raises:
        InputError: W&B refuses a setting.
        ValueError: The server does not answer, or refuses the run.
    """

    def __init__(self, tracking: TrackingArguments, header: RunHeader, earlier: str | None = None) -> None:
        import wandb

        self.status: Status = "FINISHED"
        self._tables = SampleTables(tracking, header)
        self._table = wandb.Table
        chosen_id = tracking.wandb_run_id
        continued = earlier if chosen_id is None and not os.environ.get("WANDB_RUN_ID") else None
        run_id = chosen_id or continued
        title = header.title if tracking.disable_wandb_random_suffix else f"{header.title}-{secrets.token_hex(3)}"
        with _failing_in_one_sentence(tracking, run_id):
            self._run = wandb.init(
                project=tracking.wandb_project,
                group=tracking.wandb_group,
                entity=tracking.wandb_team,
                name=title if continued is None else None,  # it has its name
                mode=_wandb_mode(tracking),
                dir=_folder(tracking)[1],
                id=run_id,
                resume=None if run_id is None else "allow",
                config=header.public_settings(),
            )
        if continued is not None and self.run_id is not None:
            print(f"note: continues the W&B run {continued} of the checkpoint in --load; --wandb-run-id names another")

    @property
    def run_id(self) -> str | None:
        """The id of the W&B run; None if W&B is disabled."""
        return None if self._run.disabled else str(self._run.id)

    def resume(self, step: int) -> None:
        """Say which steps W&B has already, of those that are repeated from ``step`` on: it takes none of them again."""
        if (known := self._run.starting_step) > step:
            print(
                f"note: the W&B run {self._run.id} has steps up to {known - 1}, and takes none of {step} to "
                f"{known - 1} again; metrics.jsonl has the repeated ones"
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step; several calls for one step are joined by W&B."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Send some answers of an iteration as the table ``samples``."""
        if rows := self._tables.rows(step, samples):
            self._run.log({"samples": self._table(columns=list(SampleTables.columns), data=rows)}, step=step)

    def close(self) -> None:
        """Finish the run: waits until everything is uploaded."""
        try:
            self._run.finish(exit_code=0 if self.status == "FINISHED" else 1)
        finally:
            _end_service()


def _end_service() -> None:
    """End W&B's own process, which the run's guard would kill, unless the user has a W&B run in this process."""
    import wandb

    if wandb.run is None:
        wandb.teardown()


def _end_failed_service() -> None:
    """End W&B's own process after a failure: it would try a server that does not answer again for many minutes."""
    services = [child for child in psutil.Process().children() if child.name().startswith("wandb")]
    timer = threading.Timer(FAILED_SECONDS, kill_all, [services, FAILED_SECONDS])
    timer.start()
    try:
        _end_service()
    finally:
        timer.cancel()


def _wandb_mode(tracking: TrackingArguments) -> Literal["online", "offline", "disabled"] | None:
    """Return ``--wandb-mode``, which validation has limited to these."""
    return cast(Literal["online", "offline", "disabled"] | None, tracking.wandb_mode)


def _folder(tracking: TrackingArguments) -> tuple[str, str]:
    """Return the flag or variable that names the folder of W&B's files, and the folder."""
    if tracking.wandb_dir is not None:
        return "--wandb-dir", tracking.wandb_dir
    if folder := os.environ.get("WANDB_DIR"):
        return "WANDB_DIR", folder
    return "--output-dir", tracking.output_dir


def _check_folder(name: str, folder: str) -> None:
    """Make the folder of W&B's files. W&B itself would take the folder of temporary files if it cannot write there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        fault = None if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except OSError as error:
        fault = error.strerror or type(error).__name__
    if fault is not None:
        raise InputError(f"{name} {folder}: W&B cannot write there ({fault}); give a folder that can be written")


@contextmanager
def _failing_in_one_sentence(tracking: TrackingArguments, run_id: str | None = None) -> Iterator[None]:
    """Turn whatever W&B raises into a sentence that names the flags and what to do."""
    import wandb

    try:
        yield
    except Exception as error:
        _end_failed_service()
        cause = one_line(str(error), CAUSE_LENGTH).strip().rstrip(".") or type(error).__name__
        checked = ["the key (WANDB_API_KEY or --wandb-key)"]
        checked += ["--wandb-host"] if tracking.wandb_host is not None else []
        checked += [f"the run {run_id} (--wandb-run-id names another)"] if run_id is not None else []
        message = (
            f"--use-wandb: W&B cannot be used ({cause}); check {', '.join(checked)} and the network, or add "
            "--wandb-mode offline, which writes files for a later wandb sync"
        )
        is_about_input = isinstance(error, wandb.errors.UsageError | ValueError)
        raise InputError(message) if is_about_input else ValueError(message) from error


# Tell a web address how a run goes: ``--notify-url``.


SECONDS = 10.0  # for one notification
LONGEST_TEXT = 1000

Event = Literal["end", "failure", "unhealthy"]


@dataclass(frozen=True, repr=False)
class Notifier:
    """Post one JSON object per event: ``{"event": …, "run": …, "text": …}``.

    ``text`` is a sentence for people, which names the run; chat services show it. An address that cannot be reached
    does not stop a run.

    Attributes:
        url: The address; None sends nothing. It may hold a token, so it is never printed.
        run: The output folder of the run.
        secrets: Texts that must not be sent.
    """

    url: str | None
    run: str
    secrets: Collection[str] = ()

    def send(self, event: Event, what: str) -> None:
        """Post an event. Raises nothing: a note reports a failure."""
        if self.url is None:
            return
        try:
            import httpx  # lazily: most runs need none

            text = hide_in_text(f"{self.run}: {what}", self.secrets)[:LONGEST_TEXT]
            body = {"event": event, "run": _encodable(self.run), "text": _encodable(text)}
            answer = httpx.post(self.url, json=body, timeout=SECONDS)
            fault = None if answer.is_success else f"status {answer.status_code}"
        except Exception as error:  # the run, or the error that ended it, matters more
            fault = type(error).__name__
        if fault is not None:
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(f"note: --notify-url: the event '{event}' could not be sent ({fault})", file=sys.stderr)


def _encodable(text: str) -> str:
    """Return ``text`` with escapes for lone surrogates, which UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()
