"""Scalars for Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from miles.arguments.tracking import TrackingArguments
from miles.tracking.run_header import RunHeader


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "--use-wandb: the package wandb is not installed; install the extra with pip install 'miles[wandb]', "
            "or leave the flag out (metrics.jsonl and TensorBoard are written either way)"
        ) from error
    return wandb


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
