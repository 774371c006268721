"""Serve the report of a run (``--report-port``), send its verdicts (``--notify-url``), and write report.html."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from miles.base.disk_faults import WriteFailed
from miles.config.tracking import TrackingArguments
from miles.observe.health import judge, unhealthy, verdicts
from miles.observe.metrics_file import MetricsFile
from miles.observe.page import RunView, write_page
from miles.observe.report.server import ReportServer
from miles.observe.run_files import METRICS, RunHeader
from miles.observe.sinks import Notifier


class ReportSink:
    """Serves the page from now on if a port is given, and writes report.html when closed, unless ``--no-report``.

    Raises:
        ValueError: ``--report-port`` is in use.
    """

    def __init__(self, tracking: TrackingArguments) -> None:
        self._tracking = tracking
        self._folder = Path(tracking.output_dir)
        self._has_rows = False
        self._closed = False
        self._server: ReportServer | None = None
        port = tracking.report_port
        if port is not None:
            self._server = _serve(self._folder, port)
            print(f"live report: {self._server.url}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note that the run has rows; the page reads them from the files."""
        self._has_rows = True

    def close(self) -> None:
        """Stop serving, and write the report if the run has logged anything. Closing twice is harmless.

        A full disk is a note: ``miles report`` shows the same page.
        """
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        if not self._has_rows:
            return
        view = RunView(self._folder)
        view.metrics_file.refresh()
        steps, total = view.metrics_file.steps, view.header.total_steps
        may_continue = bool(steps) and steps[-1] < total
        settings = view.header.settings
        print(judge(view.metrics_file, settings, runs=may_continue, total_steps=total).sentence)
        for verdict in unhealthy(verdicts(view.metrics_file, settings)):
            print(f"unhealthy  {verdict.sentence}")
        if not self._tracking.no_report:
            try:
                path = write_page(view, self._tracking.report_samples)
            except WriteFailed as error:
                print(f"note: {error}; miles report {self._folder} shows the run", file=sys.stderr)
            else:
                print(f"report: {path}")


def _serve(folder: Path, port: int) -> ReportServer:
    try:
        return ReportServer(folder, port)
    except OSError as error:
        raise ValueError(
            f"--report-port {port}: cannot be served ({error.strerror}); give another port, or 0 for any"
        ) from error


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
        self._folder = Path(tracking.output_dir)
        self._metrics = MetricsFile(self._folder / METRICS)
        self._notifier = notifier
        self._known: set[str] = set()
        self._next = 0.0  # by time.monotonic()
        self._unseen: int | None = None  # the newest step, if the rules have not read it

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Evaluate the rules, if it is time."""
        self._unseen = step
        if self._is_on and time.monotonic() >= self._next:
            self._look(step)

    def close(self) -> None:
        """Evaluate the rules on the last rows."""
        if self._is_on and self._unseen is not None:
            self._look(self._unseen)

    def _look(self, step: int) -> None:
        began = time.monotonic()
        self._unseen = None
        self._metrics.refresh()
        alarms = unhealthy(verdicts(self._metrics, RunHeader.load(self._folder).settings))
        now = time.monotonic()
        self._next = now + COSTS * (now - began)
        for verdict in alarms:
            if verdict.rule not in self._known:
                self._notifier.send("unhealthy", f"step {step}: {verdict.sentence}")
        self._known = {verdict.rule for verdict in alarms}
