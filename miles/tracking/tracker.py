"""The tracker of a run: sends every metric and every sampled answer to all sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from miles.arguments.tracking import TrackingArguments
from miles.metrics import Metric
from miles.tracking.console import ConsoleSink
from miles.tracking.report import write_report
from miles.tracking.run_files import REPORT, TENSORBOARD, RunFiles, SampleRecord
from miles.tracking.run_header import RunHeader
from miles.tracking.sinks import Sink, TensorBoardSink, WandbSink


class Tracker:
    """Fans metrics out to the console, metrics.jsonl, TensorBoard and W&B; writes the report when closed.

    A resumed run calls ``resume(step)`` before anything is logged. Without that call the run is a new one, and the
    files that an earlier run left in the folder are moved to ``earlier-N/``, never mixed in and never deleted.

    Raises:
        ValueError: At once, if ``--use-wandb`` is given and wandb is not installed.
    """

    def __init__(self, tracking: TrackingArguments, header: RunHeader) -> None:
        self._tracking = tracking
        self._header = header
        self._output_dir = Path(tracking.output_dir)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        self._files = RunFiles(self._output_dir)
        self._sinks: list[Sink] = [WandbSink(tracking, header)] if tracking.use_wandb else []
        self._console = ConsoleSink(header, tracking.output_dir)
        self._sinks.append(self._console)
        self._begun = False
        self._closed = False

    def resume(self, step: int) -> None:
        """Continue at ``step``: drop its rows and later ones, which the resumed run repeats."""
        assert not self._begun, "resume() comes before the first log()"
        self._files.drop_from(step)
        self._begin(resume_step=step)

    def _begin(self, resume_step: int | None = None) -> None:
        if self._begun:
            return
        if resume_step is None and (folder := self._files.set_aside()) is not None:
            self._console.note(f"--output-dir held an earlier run; its files are now in {folder}")
        self._header.save(self._output_dir)
        self._sinks.append(TensorBoardSink(self._output_dir / TENSORBOARD, resume_step))
        self._begun = True

    def log(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Read every metric and send it to all sinks. Evaluation may be logged apart, under the step it belongs to."""
        self._begin()
        values = {name: m.value if isinstance(m, Metric) else float(m) for name, m in metrics.items()}
        self._files.append_metrics(step, values)
        for sink in self._sinks:
            sink.log(step, values)

    def log_samples(self, iteration: int, samples: Sequence[SampleRecord]) -> None:
        """Keep ``--report-samples`` of the samples, spread evenly over them so that they show different prompts."""
        self._begin()
        count = min(self._tracking.report_samples, len(samples))
        spread = [samples[position * len(samples) // count] for position in range(count)]
        self._files.append_samples(iteration, spread)

    def close(self) -> None:
        """Close all sinks and write report.html, unless ``--no-report``. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for sink in self._sinks:
            sink.close()
        if self._begun and not self._tracking.no_report:
            write_report(self._output_dir, self._header, self._files.read_metrics(), self._files.read_samples())
            self._console.note(f"report: {self._output_dir / REPORT}")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
