"""The tracker of a run: sends every metric and every sampled answer to all sinks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from miles.base.disk_faults import WriteFailed, disk_fault, naming_disk
from miles.base.text import one_line
from miles.config.tracking import TrackingArguments
from miles.observe.console import ConsoleSink, Details, JsonSink
from miles.observe.run_files import CONFIG, TENSORBOARD, RunFiles, RunHeader, RunIdentity, SampleRecord
from miles.observe.sinks import (
    MlflowSink,
    SampleTables,
    ServiceSink,
    Sink,
    Status,
    TensorBoardSink,
    WandbSink,
    check_mlflow,
    check_packages,
    check_port,
    check_swanlab,
    failure_note,
    log_in,
)
from miles.types.metrics import Metric

_STATES: dict[Status, str] = {"FINISHED": "finished", "KILLED": "stopped", "FAILED": "failed"}


def check_services(tracking: TrackingArguments) -> None:
    """Check, before anything starts, that the services of the flags can be used: packages, servers, and W&B's key.

    Raises ``ValueError`` with one sentence, an ``InputError`` if it is about the user's input.
    """
    check_packages(tracking)
    check_mlflow(tracking)
    check_swanlab(tracking)
    log_in(tracking)
    if tracking.prometheus_port is not None:
        check_port(tracking.prometheus_port)


class Tracker:
    """Fans metrics out to the console, metrics.jsonl, the sinks of the flags, and ``further`` ones, closed last.

    A resumed run calls ``resume(step, run)`` before anything is logged. Without that call the run is a new one. Files
    that another run left in the folder are moved to ``earlier-N/``, never mixed in and never deleted.

    Args:
        tracking: The flags.
        header: The facts of the run, for run.json.
        further: Further sinks.
        config: The text of run.yaml; without one the file is not written.
        wandb_run: The id of the W&B run that a resumed run continues, as its checkpoint has it.

    A service that fails during the run is a note, and so is a disk without room for TensorBoard's files. Without room
    for the run's own files every method raises ``WriteFailed``. ``check_services`` comes first.
    """

    def __init__(
        self,
        tracking: TrackingArguments,
        header: RunHeader,
        further: Sequence[Sink] = (),
        config: str = "",
        wandb_run: str | None = None,
    ) -> None:
        self._header = header
        self._config = config
        self._tracking = tracking
        self._output_dir = Path(tracking.output_dir)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        self._files = RunFiles(self._output_dir, tracking.metrics_max_bytes)
        self._wandb = WandbSink(tracking, header, wandb_run) if tracking.use_wandb else None
        self._mlflow = MlflowSink(tracking, header) if tracking.use_mlflow else None
        self._noted = False
        self._service = ServiceSink(tracking, header) if tracking.report_to is not None else None
        self._sinks: list[Sink] = [each for each in (self._mlflow, self._service) if each is not None]
        output = JsonSink if tracking.log_format == "json" else ConsoleSink
        self._console = output(header, tracking.output_dir)
        self._sinks.append(self._console)
        self._further = further
        self._tensorboard: TensorBoardSink | None = None  # until the run begins
        self._begun = False
        self._closed = False

    @property
    def wandb_run(self) -> str | None:
        """The id of the W&B run; None without one."""
        return None if self._wandb is None else self._wandb.run_id

    @property
    def run(self) -> dict[str, str]:
        """The identity of the run, for its checkpoints."""
        return self._header.run

    def resume(self, step: int, run: RunIdentity | None = None) -> None:
        """Continue at ``step``: drop its rows and later ones, which the resumed run repeats.

        Args:
            step: The first step that the resumed run takes.
            run: The run that is continued, as its checkpoint has it; None if that does not say.
        """
        assert not self._begun, "resume() comes before the first log()"
        self._take_folder(run)
        last = self._files.drop_from(step)
        if last is not None and last < step - 1:
            self._console.note(
                f"--output-dir {self._output_dir}: its metrics end at step {last}, and this run continues after step "
                f"{step - 1}; the rows in between are missing"
            )
        self._files.forget_end()
        self._begin(resume_step=step)
        self._console.resume(step, self._files.read_metrics())
        if self._wandb is not None:
            self._wandb.resume(step)

    def _take_folder(self, run: RunIdentity | None) -> None:
        """Move the files of another run away, and note ``run`` as the folder's owner."""
        self._header = replace(self._header, run={} if run is None else run.to_state())
        owner = self._files.run
        if owner is not None and (run is None or run.id != owner.id):
            continued = "a checkpoint that does not say which run wrote it" if run is None else str(run)
            self._console.note(
                f"--output-dir {self._output_dir}: held the metrics of {owner}, and this run continues {continued}; "
                f"the files of the other are now in {self._files.set_aside()}; give each run its own --output-dir"
            )
        elif owner is None and not self._files.is_empty:
            self._console.note(
                f"--output-dir {self._output_dir}: does not say which run wrote its metrics (an earlier version of "
                "miles); this run continues them"
            )

    def _begin(self, resume_step: int | None = None) -> None:
        if self._begun:
            return
        if resume_step is None and (folder := self._files.set_aside()) is not None:
            self._console.note(f"{self._output_dir} held an earlier run; its files are now in {folder}")
        self._header.save(self._output_dir)
        if self._config:
            path = self._output_dir / CONFIG
            with naming_disk(path):
                path.write_text(self._config, encoding="utf-8")
        self._try_tensorboard(lambda: self._begin_tensorboard(resume_step))
        self._begun = True

    def _begin_tensorboard(self, resume_step: int | None) -> None:
        tables = SampleTables(self._tracking, self._header)
        most = self._tracking.metrics_max_bytes
        self._tensorboard = TensorBoardSink(self._output_dir / TENSORBOARD, resume_step, tables, most)

    def _try_tensorboard(self, call: Callable[[], None]) -> None:
        """Write TensorBoard's files. If their disk is full, say so and write no more of them."""
        folder = self._output_dir / TENSORBOARD
        try:
            call()
        except OSError as error:
            if (fault := disk_fault(folder, error)) is None:
                raise
            self._tensorboard = None
            print(f"note: {folder} is not written from now on, because {fault}", file=sys.stderr)

    def log(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Read every metric and send it to all sinks. Evaluation may be logged apart, under the step it belongs to."""
        self._begin()
        values = {name: m.value if isinstance(m, Metric) else float(m) for name, m in metrics.items()}
        self._files.append_metrics(step, values)
        if self._wandb is not None:
            self._try_wandb(partial(self._wandb.log, step, values))
        if self._tensorboard is not None:
            self._try_tensorboard(partial(self._tensorboard.log, step, values))
        for sink in (*self._sinks, *self._further):
            sink.log(step, values)

    def end_early(self, step: int) -> None:
        """Note in the folder of the run that it has come to its end after ``step``, before the last of its steps."""
        self._begin()
        self._files.mark_ended_early(step)

    def watch(self, details: Details) -> None:
        """Show the progress of phases on a terminal; ``details`` has the function to ask in each."""
        self._console.watch(details)

    def phase(self, name: str | None) -> None:
        """Show the current phase of the run; None between two phases."""
        self._console.phase(name)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Store the samples of an iteration, named by its last step, and send some to W&B and MLflow."""
        self._begin()
        self._files.append_samples(step, samples)
        self._console.log_samples(step, samples)
        if self._tensorboard is not None:
            self._try_tensorboard(partial(self._tensorboard.log_samples, step, samples))
        if self._wandb is not None:
            self._try_wandb(partial(self._wandb.log_samples, step, samples))
        if self._mlflow is not None:
            self._mlflow.log_samples(step, samples)

    def _try_wandb(self, call: Callable[[], None]) -> None:
        """Call W&B. Its first failure is a note."""
        try:
            call()
        except Exception as error:
            if not self._noted:
                print(failure_note("--use-wandb", error), file=sys.stderr)
            self._noted = True

    def close(self, status: Status = "FINISHED", why: str = "") -> None:
        """Note how the run ended, and close all sinks. Closing twice is harmless.

        Args:
            status: How the run ended.
            why: The reason in one line, of a run that has not finished.

        Raises:
            Exception: The first of the run's own sinks, when all are closed, in a run that has not failed. Other
                failures are notes.
        """
        if self._closed:
            return
        self._closed = True
        if self._begun:
            try:
                self._files.mark_end(_STATES[status], why)
            except WriteFailed as error:
                print(f"note: {error}", file=sys.stderr)
        services = [each for each in (self._wandb, self._mlflow, self._service) if each is not None]
        for service in services:
            service.status = status
        # Local sinks first: a service may take long.
        local: list[Sink] = [sink for sink in (*self._sinks, *self._further) if sink not in services]
        if self._tensorboard is not None:
            local.append(self._tensorboard)  # every event is in its file already
        first: Exception | None = None
        for sink in (*local, *services):
            try:
                sink.close()
            except Exception as error:
                if first is None and status == "FINISHED" and sink in local:
                    first = error
                else:
                    print(failure_note(type(sink).__name__, error), file=sys.stderr)
        if first is not None:
            raise first

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Exception):
            self.close("KILLED", "a signal or Ctrl-C asked it to")
        else:
            cause = getattr(error, "cause", error)  # of an error in another process
            self.close("FAILED", one_line(f"{type(cause).__name__}: {cause}".splitlines()[0], 300))
