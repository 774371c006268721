"""Train a language model by reinforcement learning (the same as ``python train.py``).

Parse and validate the flags, start Ray, place the actors, and run the loop. Wrong flags are reported before torch or
Ray are imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.arguments.checkpoint import default_remote_cache
from miles.arguments.files.run_config import FILE_NAME, run_config
from miles.arguments.launch.notes import grouped
from miles.arguments.parser import main_parse
from miles.hidden_secrets import hidden_in_output, hide_on_command_line
from miles.secret_values import secrets_in

SIGNAL_SECONDS = 2.0  # in which a signal that has ended Ray reaches this process too

if TYPE_CHECKING:
    from miles.arguments.checkpoint import CheckpointArguments
    from miles.arguments.cluster import Offload
    from miles.arguments.launch.notes import Note
    from miles.arguments.settings import Settings
    from miles.arguments.validate import Validated
    from miles.cluster.failure_files.folder import FailureFiles
    from miles.cluster.folders.remote_lock import RemoteLock
    from miles.cluster.folders.resume_point import ResumePoint
    from miles.cluster.folders.uploads import Uploads
    from miles.cluster.iteration_profiler import IterationProfiler
    from miles.cluster.restarts import Continuation, Restarts
    from miles.cluster.session import Placement
    from miles.cluster.sides import RolloutSide, TrainerSide
    from miles.cluster.stop_requests import StopRequests
    from miles.tracking.notifications import Event, Notifier
    from miles.tracking.sinks import Sink
    from miles.tracking.tracker import Tracker

    FailureHandling = Callable[[CheckpointArguments, StopRequests, FailureFiles], AbstractContextManager[None]]


@dataclass(frozen=True)
class LauncherState:
    """What a launcher needs that takes the place of one whose Ray has died.

    Attributes:
        validated: What to run: its settings resume what was saved.
        given: The flags of checkpoints as the user gave them, for run.yaml.
        restarts_left: How many restarts there are still.
    """

    validated: Validated
    given: CheckpointArguments
    restarts_left: int


@dataclass(frozen=True)
class RunContext:
    """What all attempts of a run share.

    Attributes:
        stop: Requests to stop it.
        files: Keeps what explains a failure.
        notifier: Tells ``--notify-url`` how it goes.
        restarts: How many restarts are left.
        given: The flags of checkpoints as the user gave them, for run.yaml.
        continuation: Makes the launcher that follows if Ray dies, from the settings that resume; None in a process
            that is not the launcher's alone.
        uploads: Takes what is saved and exported to URLs; None without one.
    """

    stop: StopRequests
    files: FailureFiles
    notifier: Notifier
    restarts: Restarts
    given: CheckpointArguments
    continuation: Callable[[Settings], Continuation] | None
    uploads: Uploads | None = None


def main(argv: Sequence[str], is_alone: bool = True) -> int:
    """Run the training command and return 0.

    Args:
        argv: Its words.
        is_alone: Whether this process does nothing else afterwards.

    Raises:
        SystemExit: With status 2 for wrong flags, before anything starts; with 1 if the run fails.
    """
    hide_on_command_line(argv)
    validated = main_parse(argv)
    if validated.settings.rehearsal.rehearse:
        from miles.rehearsal.command import rehearse  # imports torch

        return rehearse(validated)
    start(validated, is_alone)
    return 0


def start(validated: Validated, is_alone: bool = False) -> None:
    """Run a command that was validated: lock and check its folders, then train.

    Raises:
        SystemExit: With status 1 if the run fails.
    """
    from miles.cluster.failures import exit_with_message  # imports Ray

    launch(validated, exit_with_message, is_alone)


def in_one_process(argv: Sequence[str]) -> None:
    """Run the training command in this process alone, without Ray; as ``main``.

    Raises:
        SystemExit: As ``main``, also if the run needs more processes.
    """
    from miles.arguments.rules.one_process import check_one_process
    from miles.cluster.failures import exit_with_message

    validated = main_parse(argv)
    try:
        check_one_process(validated.settings)
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    launch(validated, exit_with_message, runner=train_in_one_process)


def take_over(previous: LauncherState) -> None:
    """Continue a run whose Ray has died, in the process that has led it so far (cluster/restarts.py), and exit."""
    from miles.cluster.failures import exit_with_message

    launch(previous.validated, exit_with_message, is_alone=True, previous=previous)
    raise SystemExit(0)


def launch(
    validated: Validated,
    failure_handling: FailureHandling,
    is_alone: bool = False,
    previous: LauncherState | None = None,
    runner: Callable[[Settings, RunContext], None] | None = None,
) -> None:
    """Lock the folders of a run, find its first iteration, and run it to its end.

    Args:
        validated: What to run.
        failure_handling: Makes the context that handles whatever ends the run early (``exit_with_message``).
        is_alone: Whether this process does nothing else afterwards.
        previous: The state that a launcher before this one has left, if there was one.
        runner: Trains; by default with Ray (``run``).
    """
    from miles.arguments.flags_view import flags_view
    from miles.cluster.failure_files.folder import FailureFiles
    from miles.cluster.failures import notifying
    from miles.cluster.folders.run_identity import own_save_folder
    from miles.cluster.folders.uploads import uploading
    from miles.cluster.stop_requests import StopRequests
    from miles.objective.hooks import check_hooks
    from miles.objective.launcher_losses.call import check_whole_loss
    from miles.tracking.json_output import as_json_lines
    from miles.tracking.notifications import Notifier
    from miles.tracking.sinks import check_packages
    from miles.training.checkpoint_folder import remove_unfinished

    settings = validated.settings
    given = settings.checkpoint
    stop = StopRequests(settings.cluster.stop_timeout)
    secrets = secrets_in("settings", asdict(settings))
    kept_out = {*secrets, *settings.cluster.trainer_environment.values()}
    files = FailureFiles(Path(settings.tracking.output_dir), kept_out)
    notifier = Notifier(settings.tracking.notify_url, settings.tracking.output_dir, secrets)
    with (
        as_json_lines(settings.tracking.log_format == "json"),
        hidden_in_output(secrets),
        failure_handling(given, stop, files),
        stop.listening(),
    ):
        check_hooks(settings.loss)
        check_whole_loss(settings.loss, flags_view(settings))
        check_packages(settings.tracking)
        with _locked(settings) as lock:
            point = _resume_point(validated)
            checkpoint = own_save_folder(point.checkpoint, point.damaged)
            if checkpoint.save is not None:
                remove_unfinished(checkpoint.local(checkpoint.save))
            settings = replace(settings, checkpoint=checkpoint)
            context = _context(validated, stop, files, notifier, is_alone, previous)
            # The second ``failure_handling`` knows where to resume from: --start-over changes it.
            with (
                failure_handling(checkpoint, stop, files),
                notifying(notifier, stop),
                uploading(settings, lock, point.damaged) as uploads,
            ):
                (runner or run)(settings, replace(context, uploads=uploads))


def _resume_point(validated: Validated) -> ResumePoint:
    """Return the point at which the run begins, and print all notes about it."""
    from miles.cluster.folders.remote_checkpoints import index_all
    from miles.cluster.folders.resume_point import check_frozen_models, resume_point
    from miles.cluster.folders.run_identity import check_load_folder

    settings = validated.settings
    given = settings.checkpoint
    notes = [*validated.notes, *index_all(given, Path(settings.tracking.output_dir)), *check_load_folder(given)]
    point = resume_point(given)
    for note in (*notes, *point.notes, *check_frozen_models(settings.model)):
        print(f"note: {note}")
    if validated.accepted:
        print("\n".join(["note: flags of the command that were accepted:", *_indented(validated.accepted)]))
    return point


@contextmanager
def _locked(settings: Settings) -> Iterator[RemoteLock | None]:
    """Hold the locks of the folders that a run writes, for the length of the block; yield that in remote storage."""
    from miles.cluster.folders.folder_lock import locked_folders
    from miles.cluster.folders.remote_lock import locked_in_remote_storage

    given = settings.checkpoint
    written = {"--output-dir": settings.tracking.output_dir, "--remote-cache": given.remote_cache}
    written |= {} if "save" in given.urls else {"--save": given.save}
    with (
        locked_folders((flag, Path(folder)) for flag, folder in written.items() if folder is not None),
        locked_in_remote_storage(given) as lock,
    ):
        yield lock


def _context(
    validated: Validated,
    stop: StopRequests,
    files: FailureFiles,
    notifier: Notifier,
    is_alone: bool,
    previous: LauncherState | None,
) -> RunContext:
    from miles.cluster.restarts import Continuation, Restarts

    settings = validated.settings
    environment = dict(os.environ)  # before Ray's variables are in it
    given = settings.checkpoint if previous is None else previous.given
    restarts = Restarts(settings.cluster.max_restarts if previous is None else previous.restarts_left)

    def continuation(resumed: Settings) -> Continuation:
        again = LauncherState(replace(validated, settings=resumed, notes=(), accepted=()), given, restarts.left)
        return Continuation(f"{__name__}:take_over", again, environment)

    can_be_replaced = is_alone and not settings.cluster.ray_address  # nobody restarts a joined cluster
    return RunContext(stop, files, notifier, restarts, given, continuation if can_be_replaced else None)


def _indented(accepted: Sequence[Note]) -> list[str]:
    return [f"  {line}" for line in grouped(accepted)]


def run(settings: Settings, context: RunContext) -> None:
    """Start Ray, train, and stop what was started; restart up to ``--max-restarts`` times if a process fails.

    Args:
        settings: The run, with the checkpoint that it begins from and the folder that it saves into.
        context: What its attempts share.
    """
    from miles.cluster.restarts import with_restarts
    from miles.cluster.session import EngineLayout, ray_session

    size = settings.sglang.rollout_num_gpus_per_engine
    engines = EngineLayout(settings.num_engines, size, settings.trains, settings.nodes_per_engine)
    files, stop = context.files, context.stop
    with ray_session(settings.cluster, engines, lambda loss: after_loss(loss, settings, context), files) as placement:
        with_restarts(settings, lambda settings: train(settings, placement, context), context.restarts, files, stop)


def after_loss(loss: str, settings: Settings, context: RunContext) -> Continuation | int:
    """Say that a part of Ray was lost, or which signal has ended it.

    Args:
        loss: What happened to it.
        settings: The run.
        context: What its attempts share.

    Returns:
        The launcher that follows, if there is to be one, or else the exit status.
    """
    from miles.cluster.failures import stopped, stopped_by
    from miles.cluster.ray_watch import is_hang

    event: Event = "failure"
    status = 1
    if context.stop.stopped_within(SIGNAL_SECONDS):
        last_line, event, status = stopped_by(context.stop, settings.checkpoint), "end", context.stop.exit_status
    else:
        if is_hang(loss):
            _try("the report of a hang", lambda: context.files.report_hang(loss, ask_ray=False))
        _try("Ray's logs", context.files.keep_ray_logs)
        if context.continuation is not None and context.restarts.left and not context.stop.is_requested:
            try:
                return context.continuation(context.restarts.take(loss, settings, context.files))
            except Exception as error:
                loss = f"{loss}, and the run cannot be restarted: {error}"
        last_line = stopped(loss, settings.checkpoint, context.files)
    with suppress(OSError):  # nobody reads it any more
        print(last_line, file=sys.stderr, flush=True)
    context.notifier.send(event, last_line)
    return status


def _try(what: str, keep: Callable[[], None]) -> None:
    """Call ``keep``; a failure is a note, as the run ends anyway and says why."""
    try:
        keep()
    except Exception as error:
        with suppress(OSError):
            print(f"note: {what} could not be kept ({type(error).__name__}: {error})", file=sys.stderr)


def train(settings: Settings, placement: Placement, context: RunContext) -> None:
    """Start the actors and run the loop, from the newest checkpoint of ``--load`` if there is one.

    Args:
        settings: The run, or an attempt of it that resumes.
        placement: The devices.
        context: What its attempts share.
    """
    from miles.cluster.iteration_profiler import IterationProfiler
    from miles.cluster.liveness import Workers
    from miles.cluster.rollout_actor import RolloutDriver
    from miles.cluster.train_actor import TrainDriver
    from miles.report.sink import ReportSink
    from miles.tracking.phase_progress import Loading
    from miles.tracking.sinks import PrometheusSink

    offload = settings.offload(placement.device)
    cluster, files, port = settings.cluster, context.files, settings.tracking.prometheus_port
    workers = Workers(cluster.worker_timeout, cluster.wait_timeout, files.report_hang, files.next_attempt)
    files.workers = workers
    with (
        Loading(settings.tracking.log_format) as loading,
        ReportSink(settings.tracking) as report,
        nullcontext() if port is None else closing(PrometheusSink(port)) as prometheus,
        # First, so that the trainer's processes import while the rollout worker starts its engines.
        TrainDriver(settings, placement, workers, context.uploads) if settings.trains else nullcontext() as trainer,
        RolloutDriver(settings, placement, workers) as rollout,
    ):
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
            _run_loop(settings, context, rollout, trainer, tracker, profiler, offload)


def train_in_one_process(settings: Settings, context: RunContext) -> None:
    """Run the loop with both sides in this process; ``check_one_process`` has allowed it."""
    from miles.one_process.sides import both_sides
    from miles.report.sink import ReportSink

    with ReportSink(settings.tracking) as report, both_sides(settings) as (rollout, trainer):
        total_steps = rollout.num_iterations * settings.steps_per_iteration
        with _tracker(settings, context, [report], total_steps) as tracker:
            _run_loop(settings, context, rollout, trainer, tracker, None, settings.offload("cpu"))


def _run_loop(
    settings: Settings,
    context: RunContext,
    rollout: RolloutSide,
    trainer: TrainerSide | None,
    tracker: Tracker,
    profiler: IterationProfiler | None,
    offload: Offload,
) -> None:
    """Run the iterations, with a trainer or without."""
    from miles.cluster.folders.run_identity import RunIdentity
    from miles.cluster.run_checkpoints import RunCheckpoints
    from miles.cluster.sides import Sides
    from miles.generation_loop import GenerationLoop
    from miles.loop import TrainingLoop
    from miles.tracking.phase_timer import PhaseTimer

    steps, stop = settings.steps_per_iteration, context.stop
    timer, profiled = (
        (PhaseTimer(), nullcontext) if profiler is None else (PhaseTimer(profiler.phase), profiler.iteration)
    )
    if trainer is None:
        GenerationLoop(rollout, tracker, settings.evaluation, steps, stop, timer, profiled).run()
        return
    sides = Sides(rollout, trainer, offload, timer)
    TrainingLoop(
        sides,
        RunCheckpoints(sides, settings.checkpoint, RunIdentity.new().to_state()),
        tracker,
        evaluation=settings.evaluation,
        steps_per_iteration=steps,
        is_synchronous=settings.rollout.async_steps == 0,
        stop=stop,
        profiled=profiled,
    ).run()


def _tracker(settings: Settings, context: RunContext, served: Sequence[Sink], total_steps: int) -> Tracker:
    """Return the tracker of a run of so many optimizer steps, with the facts about the run."""
    from miles.objective.explain import objective_formula, objective_in_words
    from miles.report.sink import HealthWatch
    from miles.tracking.provenance import provenance
    from miles.tracking.run_header import RunHeader
    from miles.tracking.tracker import Tracker

    found = provenance(settings)
    header = RunHeader.from_sections(
        "miles",
        settings,
        objective_in_words(settings.loss, settings.step_shape),
        objective_formula(settings.loss, settings.step_shape),
        total_steps,
        found,
    )
    config = _config(replace(settings, checkpoint=context.given), found)
    sinks: list[Sink] = [*served, HealthWatch(settings.tracking, context.notifier)]
    return Tracker(settings.tracking, header, sinks, config)


def _config(settings: Settings, found: dict[str, Any]) -> str:
    """Return the text of run.yaml."""
    from miles.tracking.provenance import in_words

    path = Path(settings.tracking.output_dir) / FILE_NAME
    checkpoint = settings.checkpoint
    resumes = checkpoint.load is not None and checkpoint.load == checkpoint.save
    if checkpoint.remote_cache == str(default_remote_cache(settings.tracking.output_dir)):
        settings = replace(settings, checkpoint=replace(checkpoint, remote_cache=None))
    more = [" load=null"] * resumes + [" --start-over"] * (checkpoint.save is not None)
    repeat = f"miles train --config {path}{''.join(more)} repeats this run; flags after that win."
    return run_config(settings, [*in_words(found), repeat])
