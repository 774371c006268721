"""One attempt of a run: start its rollout, trainer and tracker, and run the loop from the newest checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from miles.config.checkpoint import default_remote_cache
from miles.config.run_file import FILE_NAME, run_config
from miles.config.settings import Settings
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.config.checkpoint import CheckpointArguments
    from miles.config.cluster import Offload
    from miles.config.settings import Settings
    from miles.observe.sinks import Notifier, Sink
    from miles.observe.tracker import Tracker
    from miles.run.failures import FailureFiles
    from miles.run.iteration_profiler import IterationProfiler
    from miles.run.loop import RolloutSide, TrainerSide
    from miles.run.placement import Continuation, Restarts
    from miles.run.remote_checkpoints import Uploads
    from miles.run.session import Placement
    from miles.run.stop_requests import StopRequests


@dataclass(frozen=True)
class RunContext:
    """The context that all attempts of a run share.

    Attributes:
        stop: Requests to stop it.
        files: Keeps the files that explain a failure.
        notifier: Tells ``--notify-url`` how it goes.
        restarts: How many restarts are left.
        given: The flags of checkpoints as the user gave them, for run.yaml.
        flags: The fields that the user has set.
        continuation: Makes the launcher that follows if Ray dies, from the settings that resume; None in a process
            that is not the launcher's alone.
        uploads: Takes checkpoints and exports for URLs; None without one.
        before_writing: Raises ``ValueError`` if the run's folders are another launcher's by now.
        branch: The checkpoint in ``--load`` that it branches off from as a new run; None for other runs.
    """

    stop: StopRequests
    files: FailureFiles
    notifier: Notifier
    restarts: Restarts
    given: CheckpointArguments
    flags: frozenset[str]
    continuation: Callable[[Settings], Continuation] | None
    uploads: Uploads | None = None
    before_writing: Callable[[], None] = lambda: None
    branch: str | None = None


def train(settings: Settings, placement: Placement, context: RunContext) -> None:
    """Start the actors and run the loop, from the newest checkpoint of ``--load`` if there is one.

    Args:
        settings: The run, or an attempt of it that resumes.
        placement: The devices.
        context: The context that its attempts share.
    """
    from miles.observe.console import Loading
    from miles.observe.report.sink import ReportSink
    from miles.observe.sinks import PrometheusSink
    from miles.run.iteration_profiler import IterationProfiler
    from miles.run.ray_watch import Workers
    from miles.run.rollout_actor import RolloutDriver
    from miles.run.train_actor import TrainDriver

    offload = settings.offload(placement.device)
    cluster, files, port = settings.cluster, context.files, settings.tracking.prometheus_port
    workers = Workers(cluster.worker_timeout, cluster.wait_timeout, files.report_hang, files.next_attempt)
    files.workers = workers
    with (
        Loading(settings.tracking.log_format) as loading,
        ReportSink(settings.tracking) as report,
        nullcontext() if port is None else closing(PrometheusSink(port)) as prometheus,
        ExitStack() as sides,
        foreseen_memory(settings, placement.device) as foreseen,
    ):
        trainer = None
        if settings.trains:
            # First, so that the trainer's processes work while the rollout worker starts its engines.
            trainer = sides.enter_context(TrainDriver(settings, placement, workers, context.uploads))
            if builds_beside_engines(settings, placement.device):
                assert settings.rollout.num_rollout is not None
                trainer.start_building(settings.rollout.num_rollout * settings.steps_per_iteration)
        rollout = sides.enter_context(RolloutDriver(settings, placement, workers))
        loading.show("the trainer's models")
        if offload.rollout:
            rollout.release_memory()  # the trainer is built in the memory that this frees
        total_steps = rollout.num_iterations * settings.steps_per_iteration
        if trainer is not None:
            trainer.build(total_steps)
        loading.close()
        served: list[Sink] = [report] if prometheus is None else [report, prometheus]
        with _tracker(settings, context, served, total_steps) as tracker:
            tracker.watch({"generate": rollout.progress} | ({} if trainer is None else {"save": trainer.save_progress}))
            profiler = IterationProfiler(settings.profiling, settings.tracking.output_dir, trainer, rollout, workers)
            profiler.on_phase = tracker.phase
            _run_loop(settings, context, rollout, trainer, tracker, profiler, offload, foreseen)


def foreseen_memory(settings: Settings, device: str) -> AbstractContextManager[ForeseenMemory | None]:
    """Return the rehearsal of the trainer's memory alongside a run on GPUs; None for other runs."""
    if device != "cuda" or not settings.trains:
        return nullcontext()

    return ForeseenMemory(settings)


def builds_beside_engines(settings: Settings, device: str) -> bool:
    """Return whether the trainer builds its models while the rollout worker starts its engines.

    Not on GPUs that both share: an engine divides the memory that it finds free. Nor with ``--num-epoch``: the number
    of steps is not known until the rollout worker has read the prompts.
    """
    return settings.rollout.num_rollout is not None and not (device == "cuda" and settings.cluster.colocate)


def train_in_one_process(settings: Settings, context: RunContext) -> None:
    """Run the loop with trainer and rollout in this process; ``check_one_process`` has allowed it."""
    from miles.observe.report.sink import ReportSink
    from miles.run.one_process.sides import both_sides

    with ReportSink(settings.tracking) as report, both_sides(settings) as (rollout, trainer):
        total_steps = rollout.num_iterations * settings.steps_per_iteration
        with _tracker(settings, context, [report], total_steps) as tracker:
            _run_loop(settings, context, rollout, trainer, tracker, None, settings.offload("cpu"), None)


def _run_loop(
    settings: Settings,
    context: RunContext,
    rollout: RolloutSide,
    trainer: TrainerSide | None,
    tracker: Tracker,
    profiler: IterationProfiler | None,
    offload: Offload,
    foreseen: ForeseenMemory | None,
) -> None:
    """Run the iterations, with a trainer or without."""
    from miles.observe.console import PhaseTimer
    from miles.run.checkpoints import RunCheckpoints
    from miles.run.loop import GenerationLoop, Sides, TrainingLoop, nothing_foreseen
    from miles.run.resume import settings_to_save

    steps, stop = settings.steps_per_iteration, context.stop
    timer, profiled = (
        (PhaseTimer(), nullcontext) if profiler is None else (PhaseTimer(profiler.phase), profiler.iteration)
    )
    if trainer is None:
        GenerationLoop(
            rollout, tracker, settings.evaluation, steps, stop, timer, profiled, context.before_writing
        ).run()
        return
    sides = Sides(rollout, trainer, offload, timer)
    TrainingLoop(
        sides,
        RunCheckpoints(
            sides,
            settings.checkpoint,
            tracker.run,
            steps,
            tracker.wandb_run,
            before_writing=context.before_writing,
            settings=settings_to_save(settings),
            branch=context.branch,
        ),
        tracker,
        evaluation=settings.evaluation,
        steps_per_iteration=steps,
        is_synchronous=settings.rollout.async_steps == 0,
        stop=stop,
        profiled=profiled,
        before_writing=context.before_writing,
        foreseen=nothing_foreseen if foreseen is None else foreseen.beside,
    ).run()


def _tracker(settings: Settings, context: RunContext, served: Sequence[Sink], total_steps: int) -> Tracker:
    """Return the tracker of a run of so many optimizer steps, with the facts about the run."""
    from miles.objective.chosen import objective_formula, objective_in_words
    from miles.observe.report.sink import HealthWatch
    from miles.observe.run_files import RunHeader, RunIdentity
    from miles.observe.tracker import Tracker
    from miles.observe.tracking.provenance import provenance
    from miles.run.checkpoints import saved_wandb_run

    found, objective = provenance(settings), (settings.loss, settings.step_shape, settings.added_losses)
    header = RunHeader.from_sections(
        "miles",
        settings,
        objective_in_words(*objective),
        objective_formula(*objective),
        total_steps,
        found,
    )
    header = replace(header, run=RunIdentity.new().to_state())
    config = _config(replace(settings, checkpoint=context.given), found, context.flags)
    sinks: list[Sink] = [*served, HealthWatch(settings.tracking, context.notifier)]
    wandb_run = None if context.branch == settings.checkpoint.load else saved_wandb_run(settings.checkpoint)
    return Tracker(settings.tracking, header, sinks, config, wandb_run)


def _config(settings: Settings, found: dict[str, Any], given: Collection[str]) -> str:
    """Return the text of run.yaml."""
    from miles.observe.tracking.provenance import in_words

    path = Path(settings.tracking.output_dir) / FILE_NAME
    checkpoint = settings.checkpoint
    resumes = checkpoint.load is not None and checkpoint.load == checkpoint.save
    if checkpoint.remote_cache == str(default_remote_cache(settings.tracking.output_dir)):
        settings = replace(settings, checkpoint=replace(checkpoint, remote_cache=None))
    more = [" load=null"] * resumes + [" --start-over"] * (checkpoint.save is not None)
    repeat = f"miles train --config {path}{''.join(more)} repeats this run; flags after that win."
    return run_config(settings, [*in_words(found), repeat], given)


# Foresee the memory of a rank that trains on GPUs, so that it is logged alongside the measured memory.
#
# The traces run in a process of their own, at low priority, while the run starts (commands/rehearsal/beside_run.py).


REHEARSAL = "miles.commands.rehearsal.beside_run"  # the module that this process runs
MEASURED = "perf/trainer_memory_gib"  # of the fullest rank, by the trainer's processes
FORESEEN = "perf/trainer_memory_foreseen_gib"


class ForeseenMemory:
    """Rehearses a run alongside it.

    Args:
        settings: All sections of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._gib: float | None = None
        self._is_noted = False
        with tempfile.TemporaryFile() as given:  # a pipe would make this process wait until the other one reads it
            given.write(pickle.dumps(settings))
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", REHEARSAL],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                text=True,
            )

    def beside(self, row: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the foreseen memory if it is known by now, and note it once alongside the measurement in ``row``."""
        if not self._is_noted and self._process.poll() is not None:
            self._is_noted = True
            said, _ = self._process.communicate()
            found: dict[str, Any] = {"error": "the rehearsal failed"}
            if self._process.returncode == 0:
                found = json.loads(said.splitlines()[-1])  # user code may have printed before
            self._gib = found.get("gib")
            measured = row[MEASURED].value if MEASURED in row else None
            print(f"note: {_note(measured, self._gib, found.get('error'))}", file=sys.stderr)
        return {} if self._gib is None else {FORESEEN: Metric(self._gib)}

    def wait(self) -> None:
        """Wait until the rehearsal is over."""
        self._process.wait()

    def __enter__(self) -> ForeseenMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def _note(measured: float | None, foreseen: float | None, error: str | None) -> str:
    held = "" if measured is None else f"the fullest trainer rank has allocated {measured:.1f} GiB; "
    if foreseen is None:
        return f"{held}--rehearse cannot foresee it: {error}"
    return f"{held}--rehearse foresees {foreseen:.1f} GiB with responses of the longest length"
