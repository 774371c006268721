"""The identity of a run: what tells the checkpoints and metrics of one run from those of another."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RunIdentity:
    """The id of a run and the local time at which it first started, as its checkpoints and run.json have it."""

    id: str
    started: str

    @classmethod
    def new(cls) -> RunIdentity:
        """Return the identity of a run that starts now."""
        return cls(uuid.uuid4().hex[:12], time.strftime("%Y-%m-%d %H:%M:%S"))

    @classmethod
    def from_state(cls, saved_in: dict[str, Any]) -> RunIdentity | None:
        """Return the identity in a checkpoint's launcher state or in run.json; None for those of versions without."""
        saved = saved_in.get("run")
        if not isinstance(saved, dict) or saved.keys() != {"id", "started"}:
            return None
        return cls(str(saved["id"]), str(saved["started"]))

    def to_state(self) -> dict[str, str]:
        """Return plain JSON, to be saved as ``run``."""
        return asdict(self)

    def __str__(self) -> str:
        return f"run {self.id} of {self.started}"
