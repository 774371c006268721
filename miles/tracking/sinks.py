"""Sinks of metrics outside the output folder: TensorBoard and Weights & Biases. A sink is one class here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from miles.arguments.tracking import TrackingArguments
from miles.tracking.run_header import RunHeader


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


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "--use-wandb: the package wandb is not installed; install the extra with pip install 'miles[wandb]', "
            "or leave the flag out (metrics.jsonl and TensorBoard are written either way)"
        ) from error
    return wandb
