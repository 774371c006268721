"""Scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


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
