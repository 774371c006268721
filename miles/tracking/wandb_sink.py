"""Log to Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from miles.arguments.tracking import TrackingArguments
from miles.tracking.run_files import SampleRecord
from miles.tracking.run_header import RunHeader
from miles.tracking.sinks import SampleTables, Status


class WandbSink:
    """One W&B run."""

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        import wandb

        self.status: Status = "FINISHED"
        self._tables, self._table = SampleTables(tracking, header), wandb.Table
        if tracking.wandb_key is not None or tracking.wandb_host is not None:
            wandb.login(key=tracking.wandb_key, host=tracking.wandb_host)
        self._run = wandb.init(
            project=tracking.wandb_project,
            group=tracking.wandb_group,
            entity=tracking.wandb_team,
            name=header.title if tracking.disable_wandb_random_suffix else f"{header.title}-{secrets.token_hex(3)}",
            dir=tracking.output_dir,
            id=tracking.wandb_run_id,
            resume=None if tracking.wandb_run_id is None else "allow",
            config=header.public_settings(),
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
        self._run.finish(exit_code=0 if self.status == "FINISHED" else 1)
