"""Sinks of metrics outside the output folder: TensorBoard and Weights & Biases. A sink is one class here."""

from __future__ import annotations

import secrets
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
        from torch.utils.tensorboard import SummaryWriter  # lazily: slow to import, and only the driver writes

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=resume_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write every value as a scalar of its own name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
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
