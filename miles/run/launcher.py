"""A run from validated settings to its end: lock its folders, find its first iteration, make its attempts.

::

    launch ── locks, checkpoint to resume from ──> run ── Ray ──> attempt.train, again after a failure (--max-restarts)
                                                    └── Ray is lost ──> after_loss ── a new launcher ──> take_over
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from miles.base.locks import FolderLocks, RemoteLock, locked_folders, locked_in_remote_storage
from miles.base.processes import killed_with_parent
from miles.base.secrets import hidden_in_output, secrets_in
from miles.base.text import InputError
from miles.config.checkpoint import (
    NOT_OF_ITS_OWN,
    CheckpointArguments,
    default_remote_cache,
    fault_of_nothing,
    first_iteration,
)
from miles.config.cluster import Offload
from miles.config.functions import flags_view
from miles.config.host_share import host_line
from miles.config.inputs import check_inputs
from miles.config.notes import grouped
from miles.config.rollout import path_of_iteration
from miles.config.run_file import FILE_NAME, run_config
from miles.config.settings import Settings
from miles.config.validate import Validated
from miles.objective.chosen import objective_formula, objective_in_words
from miles.objective.hooks import check_hooks
from miles.observe.console import Loading, PhaseTimer, as_json_lines
from miles.observe.provenance import in_words, provenance
from miles.observe.report.sink import HealthWatch, ReportSink
from miles.observe.run_files import RunHeader, RunIdentity
from miles.observe.sinks import Event, Notifier, PrometheusSink, Sink
from miles.observe.tracker import Tracker, check_services
from miles.run import stop_requests
from miles.run.checkpoints import RunCheckpoints, check_same_steps, note_of_nothing_left, saved_wandb_run
from miles.run.failure_files import FailureFiles
from miles.run.failures import exit_with_message, notifying, stopped, stopped_by
from miles.run.iteration_profiler import IterationProfiler
from miles.run.liveness import Workers
from miles.run.loop import Drivers, GenerationLoop, TrainingLoop
from miles.run.one_process.drivers import OneProcessRollout, OneProcessTrainer, both_drivers
from miles.run.ray_watch import is_hang
from miles.run.remote_checkpoints import Uploads, index_all, uploading
from miles.run.restarts import Continuation, Restarts, loading_its_own, with_restarts
from miles.run.resume import (
    ResumePoint,
    branch_of,
    check_frozen_models,
    check_load_folder,
    check_settings,
    own_save_folder,
    resume_point,
    settings_to_save,
)
from miles.run.rollout_actor import RolloutDriver
from miles.run.session import EngineLayout, Placement, keeping_logs, ray_session
from miles.run.stop_requests import StopRequests
from miles.run.train_actor import TrainDriver
from miles.training.checkpoint_files import recover_exports, remove_unfinished
from miles.types.metrics import Metric

FailureHandling = Callable[[CheckpointArguments, StopRequests, FailureFiles], AbstractContextManager[None]]


# One attempt of a run: start its rollout, trainer and tracker, and run the loop from the newest checkpoint.


@dataclass(frozen=True)
class RunContext:
    """The context that all attempts of a run share.

    Attributes:
        stop: Requests to stop it.
        files: Keeps the files that explain a failure.
        notifier: Tells ``--notify-url`` how it goes.
        restarts: How many restarts are left.
        of_command: The flags of checkpoints as the user gave them, for run.yaml.
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
    of_command: CheckpointArguments
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
    offload = settings.offload(placement.device)
    cluster, files = settings.cluster, context.files
    workers = Workers(cluster.worker_timeout, cluster.wait_timeout, files.report_hang, files.next_attempt)
    files.workers = workers
    port = settings.tracking.prometheus_port
    with (
        closing(Loading(settings.tracking.log_format)) as loading,
        closing(ReportSink(settings.tracking)) as report,
        nullcontext() if port is None else closing(PrometheusSink(port)) as prometheus,
        ExitStack() as stack,
        foreseen_memory(settings, placement.device) as foreseen,
    ):
        trainer = None
        if settings.trains:
            # First, so that the trainer's processes work while the rollout worker starts its engines.
            trainer = stack.enter_context(TrainDriver(settings, placement, workers, context.uploads))
            if builds_while_engines_start(settings, placement.device):
                assert settings.rollout.num_rollout is not None
                trainer.start_building(settings.rollout.num_rollout * settings.steps_per_iteration)
        rollout = RolloutDriver(settings, placement, workers)
        stack.callback(rollout.stop)
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
            out = settings.tracking.output_dir
            profiler = IterationProfiler(settings.profiling, out, trainer, rollout, workers, tracker.phase)
            _run_loop(settings, context, rollout, trainer, tracker, profiler, offload, foreseen)


def foreseen_memory(settings: Settings, device: str) -> AbstractContextManager[ForeseenMemory | None]:
    """Return the rehearsal of the trainer's memory alongside a run on GPUs; None for other runs."""
    if device != "cuda" or not settings.trains:
        return nullcontext()
    return closing(ForeseenMemory(settings))


def builds_while_engines_start(settings: Settings, device: str) -> bool:
    """Return whether the trainer builds its models while the rollout worker starts its engines.

    Not on GPUs that both share: an engine divides the memory that it finds free. Nor with ``--num-epoch``: the number
    of steps is not known until the rollout worker has read the prompts.
    """
    return settings.rollout.num_rollout is not None and not (device == "cuda" and settings.cluster.colocate)


def train_in_one_process(settings: Settings, context: RunContext) -> None:
    """Run the loop with trainer and rollout in this process; ``check_one_process`` has allowed it."""
    with closing(ReportSink(settings.tracking)) as report, both_drivers(settings) as (rollout, trainer):
        total_steps = rollout.num_iterations * settings.steps_per_iteration
        with _tracker(settings, context, [report], total_steps) as tracker:
            _run_loop(settings, context, rollout, trainer, tracker, None, settings.offload("cpu"), None)


def _run_loop(
    settings: Settings,
    context: RunContext,
    rollout: RolloutDriver | OneProcessRollout,
    trainer: TrainDriver | OneProcessTrainer | None,
    tracker: Tracker,
    profiler: IterationProfiler | None,
    offload: Offload,
    foreseen: ForeseenMemory | None,
) -> None:
    """Run the iterations, with a trainer or without."""
    steps, stop = settings.steps_per_iteration, context.stop
    timer = PhaseTimer() if profiler is None else PhaseTimer(profiler.phase)
    profiled: Callable[[int], AbstractContextManager[object]]
    profiled = nullcontext if profiler is None else profiler.iteration
    if trainer is None:
        GenerationLoop(
            rollout, tracker, settings.evaluation, steps, stop, timer, profiled, context.before_writing
        ).run()
        return
    drivers = Drivers(rollout, trainer, settings.generates, offload, timer)
    checkpoints = RunCheckpoints(
        drivers,
        settings.checkpoint,
        tracker.run,
        steps,
        tracker.wandb_run,
        before_writing=context.before_writing,
        settings=settings_to_save(settings),
        branch=context.branch,
    )
    TrainingLoop(
        drivers,
        checkpoints,
        tracker,
        evaluation=settings.evaluation,
        steps_per_iteration=steps,
        is_synchronous=settings.rollout.async_steps == 0 and not settings.reads_samples,
        stop=stop,
        profiled=profiled,
        foreseen=(lambda _: {}) if foreseen is None else foreseen.compare,
    ).run()


def _tracker(settings: Settings, context: RunContext, served: Sequence[Sink], total_steps: int) -> Tracker:
    """Return the tracker of a run of so many optimizer steps, with the facts about the run."""
    facts = provenance(settings)
    objective = settings.loss, settings.step_shape, settings.added_losses
    words, formula = objective_in_words(*objective), objective_formula(*objective)
    header = RunHeader.from_sections("miles", settings, words, formula, total_steps, facts)
    header = replace(header, run=RunIdentity.new().to_state())
    config = _config(replace(settings, checkpoint=context.of_command), facts, context.flags)
    sinks: list[Sink] = [*served, HealthWatch(settings.tracking, context.notifier)]
    wandb_run = None if context.branch == settings.checkpoint.load else saved_wandb_run(settings.checkpoint)
    return Tracker(settings.tracking, header, sinks, config, wandb_run)


def _config(settings: Settings, facts: dict[str, Any], set_fields: Collection[str]) -> str:
    """Return the text of run.yaml."""
    path = Path(settings.tracking.output_dir) / FILE_NAME
    checkpoint = settings.checkpoint
    resumes = checkpoint.load is not None and checkpoint.load == checkpoint.save
    if checkpoint.remote_cache == str(default_remote_cache(settings.tracking.output_dir)):
        settings = replace(settings, checkpoint=replace(checkpoint, remote_cache=None))
    more = " load=null" if resumes else ""
    if checkpoint.save is not None:
        more += " --start-over"
    repeat = f"miles train --config {path}{more} repeats this run; flags after that win."
    return run_config(settings, [*in_words(facts), repeat], set_fields)


# Foresee the memory of a rank that trains on GPUs, so that it is logged alongside the measured memory.
#
# The traces run in a process of their own, at low priority, while the run starts (commands/rehearsal/command.py).


REHEARSAL = "miles.commands.rehearsal.command"  # the module that this process runs
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
        with tempfile.TemporaryFile() as file:  # a pipe would make this process wait until the other one reads it
            file.write(pickle.dumps(settings))
            file.seek(0)
            self._process = subprocess.Popen(
                killed_with_parent("nice", sys.executable, "-m", REHEARSAL),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                text=True,
            )

    def compare(self, row: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the foreseen memory if it is known by now, and note it once alongside the measurement in ``row``."""
        if not self._is_noted and self._process.poll() is not None:
            self._is_noted = True
            output, _ = self._process.communicate()
            result: dict[str, Any] = {"error": "the rehearsal failed"}
            if self._process.returncode == 0:
                result = json.loads(output.splitlines()[-1])  # user code may have printed before
            self._gib = result.get("gib")
            measured = row[MEASURED].value if MEASURED in row else None
            print(f"note: {_note(measured, self._gib, result.get('error'))}", file=sys.stderr)
        return {} if self._gib is None else {FORESEEN: Metric(self._gib)}

    def close(self) -> None:
        """End the rehearsal."""
        self._process.kill()
        self._process.wait()


def _note(measured: float | None, foreseen: float | None, error: str | None) -> str:
    measurement = "" if measured is None else f"the fullest trainer rank has allocated {measured:.1f} GiB; "
    if foreseen is None:
        return f"{measurement}--rehearse cannot foresee it: {error}"
    return f"{measurement}--rehearse foresees {foreseen:.1f} GiB with responses of the longest length"


@dataclass(frozen=True)
class LauncherState:
    """The state for a launcher that replaces one whose Ray has died.

    Attributes:
        validated: The run to start: its settings resume from the last checkpoint.
        of_command: The flags of checkpoints as the user gave them, for run.yaml.
        restarts_left: How many restarts there are still.
    """

    validated: Validated
    of_command: CheckpointArguments
    restarts_left: int


def take_over(previous: LauncherState) -> None:
    """Continue a run whose Ray has died, in the process that has led it so far (run/restarts.py), and exit.

    Its trainer may have saved once more between the loss of Ray and its own end, so the newest checkpoint is sought
    again.
    """
    validated = replace(previous.validated, settings=loading_its_own(previous.validated.settings))
    launch(validated, is_alone=True, previous=previous)
    raise SystemExit(0)


def launch(
    validated: Validated,
    failure_handling: FailureHandling = exit_with_message,
    is_alone: bool = False,
    previous: LauncherState | None = None,
    runner: Callable[[Settings, RunContext], None] | None = None,
) -> None:
    """Lock the folders of a run, find its first iteration, and run it to its end.

    Args:
        validated: What to run.
        failure_handling: Makes the context that handles whatever ends the run early.
        is_alone: Whether this process does nothing else afterwards.
        previous: The state that a launcher before this one has left, if there was one.
        runner: Trains; by default with Ray (``run``).
    """
    settings = validated.settings
    section = settings.checkpoint
    of_command = section if previous is None else previous.of_command
    stop = StopRequests(settings.cluster.stop_timeout)
    secrets = secrets_in("settings", asdict(settings))
    secret_values = {*secrets, *settings.cluster.trainer_environment.values()}
    files = FailureFiles(Path(settings.tracking.output_dir), secret_values)
    notifier = Notifier(settings.tracking.notify_url, settings.tracking.output_dir, secrets)
    with (
        as_json_lines(settings.tracking.log_format == "json"),
        hidden_in_output(secrets),
        failure_handling(_as_in_command(section, of_command), stop, files),
        stop.listening(is_alone),
    ):
        _check(validated, previous is None)
        with _locked(settings) as (folders, lock):
            point, branch, notes = _resume_point(validated)
            if previous is None and (note := _note_if_finished(settings, point.checkpoint)) is not None:
                print(note)
                return
            _print_notes(notes, validated)
            checkpoint = own_save_folder(point.checkpoint, point.damaged)
            _finish_what_was_killed(checkpoint)
            settings = replace(settings, checkpoint=checkpoint)
            context = _context(validated, stop, files, notifier, is_alone, previous)
            # The second ``failure_handling`` knows where to resume from: --start-over changes it.
            with (
                failure_handling(_as_in_command(checkpoint, of_command), stop, files),
                notifying(notifier, stop),
                uploading(settings, lock, point.damaged) as uploads,
            ):
                (runner or run)(
                    settings, replace(context, uploads=uploads, before_writing=folders.check, branch=branch)
                )


def _check(validated: Validated, is_first: bool) -> None:
    """Check facts that the settings alone do not show; a command's rows and functions are checked when it is read."""
    settings = validated.settings
    if validated.inputs is None and is_first:
        check_inputs(settings, starts=True)
    check_hooks(settings.loss, flags_view(settings))
    check_services(settings.tracking)


def _as_in_command(checkpoint: CheckpointArguments, of_command: CheckpointArguments) -> CheckpointArguments:
    """Return the flags for a message on how to resume: the attempt's flags, with switches as in the command.

    A restart drops some switches (run/restarts.py), and the user has to leave them out too.
    """
    return replace(checkpoint, **{name: getattr(of_command, name) for name in NOT_OF_ITS_OWN})


def _finish_what_was_killed(checkpoint: CheckpointArguments) -> None:
    """Remove half-written checkpoints, and finish an export that a killed run was exchanging."""
    if checkpoint.save is not None:
        remove_unfinished(checkpoint.local(checkpoint.save))
    if checkpoint.save_hf is not None and "save_hf" not in checkpoint.urls:
        try:
            recover_exports(checkpoint.save_hf)
        except OSError as error:
            raise ValueError(
                f"--save-hf {checkpoint.save_hf}: a run was killed while it exchanged this export, and what is in "
                f"{error.filename} cannot be put into place ({error.strerror}); rename it to the name of the export, "
                "or give another folder"
            ) from None


def _resume_point(validated: Validated) -> tuple[ResumePoint, str | None, list[str]]:
    """Return the point at which the run begins, the checkpoint if it is a branch, and all notes about it."""
    settings = validated.settings
    section = settings.checkpoint
    notes = [*validated.notes, *index_all(section, Path(settings.tracking.output_dir)), *check_load_folder(section)]
    if (fault := fault_of_nothing(section, settings.model.ref_load)) is not None:
        raise InputError(f"--load {section.load}: {'; '.join(fault)}")
    point = resume_point(section)
    check_same_steps(point.checkpoint, settings.steps_per_iteration)
    branch, branch_notes = branch_of(section)
    notes += [*point.notes, *branch_notes, *check_settings(point.checkpoint, settings)]
    return point, branch, [*notes, *check_frozen_models(settings.model)]


def _print_notes(notes: Sequence[str], validated: Validated) -> None:
    print(host_line(validated.settings))
    for note in notes:
        print(f"note: {note}")
    if validated.accepted:
        lines = [f"  {line}" for line in grouped(validated.accepted)]
        print("\n".join(["note: flags of the command that were accepted:", *lines]))


def _note_if_finished(settings: Settings, start: CheckpointArguments) -> str | None:
    """Return the note on a run that has neither an iteration nor an export left to do; None for others."""
    last, done = settings.rollout.num_rollout, first_iteration(start)
    if last is None or not done or done < last or start.urls:
        return None
    if start.save_hf is not None and not Path(path_of_iteration(start.save_hf, done)).exists():
        return None
    return note_of_nothing_left(done, last)


@contextmanager
def _locked(settings: Settings) -> Iterator[tuple[FolderLocks, RemoteLock | None]]:
    """Hold the locks of the folders that a run writes, for the length of the block; yield them."""
    section = settings.checkpoint
    written = {"--output-dir": settings.tracking.output_dir, "--remote-cache": section.remote_cache}
    if "save" not in section.urls:
        written["--save"] = section.save
    written["--update-weight-disk-dir"] = settings.sglang.update_weight_disk_dir
    folders = [(flag, Path(folder)) for flag, folder in written.items() if folder is not None]
    with (
        locked_folders(folders, None if "save_hf" in section.urls else section.save_hf) as local,
        locked_in_remote_storage(section.urls.get("save"), section.file_system_options) as remote,
    ):
        yield local, remote


def _context(
    validated: Validated,
    stop: StopRequests,
    files: FailureFiles,
    notifier: Notifier,
    is_alone: bool,
    previous: LauncherState | None,
) -> RunContext:
    settings = validated.settings
    environment = dict(os.environ)  # before Ray's variables are in it
    section = settings.checkpoint if previous is None else previous.of_command
    restarts = Restarts(settings.cluster.max_restarts if previous is None else previous.restarts_left)

    def continuation(resumed: Settings) -> Continuation:
        state = LauncherState(
            replace(validated, settings=resumed, readings=(), surprises=(), accepted=()), section, restarts.left
        )
        return Continuation(f"{__name__}:take_over", state, environment)

    can_be_replaced = is_alone and not settings.cluster.ray_address  # nobody restarts a joined cluster
    next_launcher = continuation if can_be_replaced else None
    return RunContext(stop, files, notifier, restarts, section, validated.set_fields, next_launcher)


def run(settings: Settings, context: RunContext) -> None:
    """Start Ray, train, and stop what was started; restart up to ``--max-restarts`` times if a process fails.

    Args:
        settings: The run, with the checkpoint that it begins from and the folder that it saves into.
        context: What its attempts share.
    """
    print("starting Ray and the processes of the run …", flush=True)

    size = settings.sglang.rollout_num_gpus_per_engine
    engines = EngineLayout(settings.num_engines, size, settings.trains, settings.nodes_per_engine)
    files, stop = context.files, context.stop
    ended = partial(after_loss, settings=settings, context=context)
    with ray_session(settings.cluster, engines, ended, files) as placement, keeping_logs(files, stop):

        def attempt(settings: Settings) -> None:
            placement.renew()
            train(settings, placement, context)

        with_restarts(settings, attempt, context.restarts, files, stop)


def after_loss(loss: str, settings: Settings, context: RunContext) -> Continuation | int:
    """Say that a part of Ray was lost, or which signal has ended it.

    Args:
        loss: The event that ended it.
        settings: The run.
        context: What its attempts share.

    Returns:
        The launcher that follows, if there is to be one, or else the exit status.
    """
    event: Event = "failure"
    status = 1
    checkpoint = _as_in_command(settings.checkpoint, context.of_command)
    has_joined = bool(settings.cluster.ray_address)
    if context.stop.stopped_within(stop_requests.SIGNAL_SECONDS, only_notes=True):
        last_line, event, status = stopped_by(context.stop, checkpoint), "end", context.stop.exit_status
    else:
        if is_hang(loss) and not has_joined:  # else it would show this process only
            _try("the report of a hang", lambda: context.files.report_hang(loss, ask_ray=False))
        _try("Ray's logs", context.files.keep_ray_logs)
        if context.continuation is not None and context.restarts.left and not context.stop.is_requested:
            try:
                return context.continuation(context.restarts.take(loss, settings, context.files))
            except Exception as error:
                loss = f"{loss}, and the run cannot be restarted: {error}"
        last_line = stopped(loss, checkpoint, context.files)
    if has_joined and context.files.workers is not None:  # the guard ends the workers of its own Ray
        context.files.workers.end_directly()
    with suppress(OSError):  # nobody reads it any more
        print(last_line, file=sys.stderr, flush=True)
    context.notifier.send(event, last_line)
    return status


def _try(what: str, keep: Callable[[], None]) -> None:
    """Call ``keep``; a failure is a note, as the run ends anyway and states why."""
    try:
        keep()
    except Exception as error:
        with suppress(OSError):
            print(f"note: {what} could not be kept ({type(error).__name__}: {error})", file=sys.stderr)
