"""Send a notification when a health verdict of a running run becomes unhealthy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from miles.arguments.tracking import TrackingArguments
from miles.report.health import unhealthy, verdicts
from miles.report.metrics_file import MetricsFile
from miles.tracking.notifications import Notifier
from miles.tracking.run_files import METRICS

COSTS = 100  # an evaluation may cost one in so many seconds of a run


class HealthWatch:
    """A sink that evaluates the rules on metrics.jsonl, and sends each verdict when it becomes unhealthy.

    Each rule reads the whole run, so they are evaluated at most once in the time that a hundred evaluations take.

    Args:
        tracking: The flags. Without ``--notify-url`` nothing is evaluated.
        notifier: Sends the notifications.
    """

    def __init__(self, tracking: TrackingArguments, notifier: Notifier) -> None:
        self._is_on = tracking.notify_url is not None
        self._metrics = MetricsFile(Path(tracking.output_dir) / METRICS)
        self._notifier = notifier
        self._known: set[str] = set()
        self._next = 0.0  # by time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Evaluate the rules, if it is time."""
        if self._is_on and time.monotonic() >= self._next:
            self._look(step)

    def close(self) -> None:
        """Do nothing: the last row was seen or was close to the one before."""

    def _look(self, step: int) -> None:
        began = time.monotonic()
        self._metrics.refresh()
        found = unhealthy(verdicts(self._metrics))
        now = time.monotonic()
        self._next = now + COSTS * (now - began)
        for verdict in found:
            if verdict.rule not in self._known:
                self._notifier.send(
                    "unhealthy", f"step {step}: {verdict.rule}: {verdict.figure}; {verdict.advice} ({verdict.flag})"
                )
        self._known = {verdict.rule for verdict in found}
