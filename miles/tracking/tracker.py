"""The tracker of a run: sends every metric and every sampled answer to all sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from miles.arguments.tracking import TrackingArguments
from miles.metrics import Metric
from miles.tracking.console import ConsoleSink, JsonSink, RunOutput
from miles.tracking.run_files import CONFIG, TENSORBOARD, RunFiles, SampleRecord
from miles.tracking.run_header import RunHeader
from miles.tracking.sinks import MlflowSink, PrometheusSink, Sink, TensorBoardSink, WandbSink


class Tracker:
    """Fans metrics out to the console, metrics.jsonl, the sinks of the flags, and ``further`` ones, closed last.

    A resumed run calls ``resume(step)`` before anything is logged. Without that call the run is a new one, and the
    files that an earlier run left in the folder are moved to ``earlier-N/``, never mixed in and never deleted.

    Args:
        tracking: The flags.
        header: The facts of the run, for run.json.
        further: Further sinks.
        config: The text of run.yaml; without one the file is not written.

    Raises:
        ValueError: At once, if the package of a sink is not installed, or its port is in use.
    """

    def __init__(
        self, tracking: TrackingArguments, header: RunHeader, further: Sequence[Sink] = (), config: str = ""
    ) -> None:
        self._header = header
        self._config = config
        self._output_dir = Path(tracking.output_dir)
        self._output_dir.mkdir(parents=True, exist_ok=True)
        self._files = RunFiles(self._output_dir)
        self._sinks: list[Sink] = [WandbSink(tracking, header)] if tracking.use_wandb else []
        if tracking.use_mlflow:
            self._sinks.append(MlflowSink(tracking, header))
        if tracking.prometheus_port is not None:
            self._sinks.append(PrometheusSink(tracking.prometheus_port))
        output = JsonSink if tracking.log_format == "json" else ConsoleSink
        self._console: RunOutput = output(header, tracking.output_dir)
        self._sinks.append(self._console)
        self._further = further
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
        if self._config:
            (self._output_dir / CONFIG).write_text(self._config, encoding="utf-8")
        self._sinks.append(TensorBoardSink(self._output_dir / TENSORBOARD, resume_step))
        self._begun = True

    def log(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Read every metric and send it to all sinks. Evaluation may be logged apart, under the step it belongs to."""
        self._begin()
        values = {name: m.value if isinstance(m, Metric) else float(m) for name, m in metrics.items()}
        self._files.append_metrics(step, values)
        for sink in (*self._sinks, *self._further):
            sink.log(step, values)

    def phase(self, name: str | None) -> None:
        """Show what the run is doing from now on; None between two phases."""
        self._console.phase(name)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Store the samples of an iteration, named by its last step."""
        self._begin()
        self._files.append_samples(step, samples)

    def close(self) -> None:
        """Close all sinks. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        for sink in (*self._sinks, *self._further):
            sink.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
