"""Sinks of metrics outside the output folder: TensorBoard, Weights & Biases, MLflow, Prometheus. Each is one class."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from miles.arguments.tracking import TrackingArguments
from miles.tracking.run_header import RunHeader

MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # that MLflow takes in one call
MLFLOW_VALUE = 500  # characters of a parameter


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Flush and close; no call follows."""


class TensorBoardSink:
    """Writes event files into ``folder``; TensorBoard hides older events from ``resume_step`` on."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        # Lazily: slow to import, and only the launcher writes. Not torch's SummaryWriter, which needs torch.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if resume_step is not None:  # TensorBoard takes a start of this version as the end of later steps
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=resume_step, file_version="brain.Event:2"))
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write every value as a scalar of its own name."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """One W&B run. Raises ``ValueError`` naming the extra when wandb is not installed."""

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        wandb = _import_wandb()
        if tracking.wandb_key is not None or tracking.wandb_host is not None:
            wandb.login(key=tracking.wandb_key, host=tracking.wandb_host)
        self._run = wandb.init(
            project=tracking.wandb_project,
            group=tracking.wandb_group,
            entity=tracking.wandb_team,
            name=header.title if tracking.disable_wandb_random_suffix else f"{header.title}-{secrets.token_hex(3)}",
            dir=tracking.output_dir,
            config=header.public_settings(),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step; several calls for one step are joined by W&B."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run: waits until everything is uploaded."""
        self._run.finish()


class MlflowSink:
    """One run of MLflow. Raises ``ValueError`` naming the extra when MLflow is not installed."""

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        mlflow = _import_mlflow()
        self._client = mlflow.MlflowClient(tracking_uri=tracking.mlflow_tracking_uri)
        name = tracking.mlflow_experiment
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=header.title).info.run_id
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param
        shown = header.public_settings().items()
        params = [(f"{section}.{name}", str(value)) for section, values in shown for name, value in values.items()]
        for start in range(0, len(params), MLFLOW_PARAMS):
            batch = [self._param(name, value[:MLFLOW_VALUE]) for name, value in params[start : start + MLFLOW_PARAMS]]
            self._client.log_batch(self._run, params=batch)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MLFLOW_METRICS])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class PrometheusSink:
    """Serve the newest value of each metric on a port of the loopback address, for Prometheus.

    ``miles_metric{name="train/grad_norm"}`` has the value, ``miles_step`` the newest step. Raises ``ValueError`` naming
    the extra when the client library is not installed, and if the port is in use.
    """

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as error:
            raise ValueError(
                "--prometheus-port: the package prometheus-client is not installed; install the extra with pip install "
                "'miles[prometheus]', or leave the flag out"
            ) from error
        registry = CollectorRegistry()
        self._metric = Gauge("miles_metric", "The newest value of a metric of the run.", ["name"], registry=registry)
        self._step = Gauge("miles_step", "The newest optimizer step.", registry=registry)
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ValueError(
                f"--prometheus-port {port}: cannot be served ({error.strerror}); give another port, or 0 for any"
            ) from error
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
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _import_mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise ValueError(
            "--use-mlflow: the package mlflow is not installed; install the extra with pip install 'miles[mlflow]', or "
            "leave the flag out (metrics.jsonl and TensorBoard are written either way)"
        ) from error
    return mlflow


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "--use-wandb: the package wandb is not installed; install the extra with pip install 'miles[wandb]', "
            "or leave the flag out (metrics.jsonl and TensorBoard are written either way)"
        ) from error
    return wandb
