"""A run from validated settings to its end: lock its folders, find its first iteration, make its attempts.

::

    launch ── locks, checkpoint to resume from ──> run ── Ray ──> attempt.train, again after a failure (--max-restarts)
                                                    └── Ray is lost ──> after_loss ── a new launcher ──> take_over
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from miles.base.secrets import hidden_in_output, secrets_in
from miles.base.text import InputError
from miles.config.checkpoint import NOT_OF_ITS_OWN, fault_of_nothing
from miles.config.host_share import host_line
from miles.config.inputs import check_inputs
from miles.config.notes import grouped
from miles.run.launcher.attempt import RunContext, train

if TYPE_CHECKING:
    from miles.base.locks import FolderLocks, RemoteLock
    from miles.config.checkpoint import CheckpointArguments
    from miles.config.notes import Note
    from miles.config.settings import Settings
    from miles.config.validate import Validated
    from miles.observe.sinks import Event, Notifier
    from miles.run.failures import FailureFiles
    from miles.run.placement import Continuation
    from miles.run.resume import ResumePoint
    from miles.run.stop_requests import StopRequests

    FailureHandling = Callable[[CheckpointArguments, StopRequests, FailureFiles], AbstractContextManager[None]]


@dataclass(frozen=True)
class LauncherState:
    """The state for a launcher that replaces one whose Ray has died.

    Attributes:
        validated: The run to start: its settings resume from the last checkpoint.
        given: The flags of checkpoints as the user gave them, for run.yaml.
        restarts_left: How many restarts there are still.
    """

    validated: Validated
    given: CheckpointArguments
    restarts_left: int


def take_over(previous: LauncherState) -> None:
    """Continue a run whose Ray has died, in the process that has led it so far (run/restarts.py), and exit.

    Its trainer may have saved once more between the loss of Ray and its own end, so the newest checkpoint is sought
    again.
    """
    from miles.run.failures import exit_with_message
    from miles.run.placement import loading_its_own

    validated = replace(previous.validated, settings=loading_its_own(previous.validated.settings))
    launch(validated, exit_with_message, is_alone=True, previous=previous)
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
    from miles.observe.console import as_json_lines
    from miles.observe.sinks import Notifier
    from miles.run.failures import FailureFiles, notifying
    from miles.run.remote_checkpoints import uploading
    from miles.run.resume import own_save_folder
    from miles.run.stop_requests import StopRequests

    settings = validated.settings
    given = settings.checkpoint
    of_command = given if previous is None else previous.given
    stop = StopRequests(settings.cluster.stop_timeout)
    secrets = secrets_in("settings", asdict(settings))
    kept_out = {*secrets, *settings.cluster.trainer_environment.values()}
    files = FailureFiles(Path(settings.tracking.output_dir), kept_out)
    notifier = Notifier(settings.tracking.notify_url, settings.tracking.output_dir, secrets)
    with (
        as_json_lines(settings.tracking.log_format == "json"),
        hidden_in_output(secrets),
        failure_handling(_as_in_command(given, of_command), stop, files),
        stop.listening(is_alone),
    ):
        _check(validated, previous is None)
        with _locked(settings) as (folders, lock):
            point, branch = _resume_point(validated)
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
    from miles.config.flags_view import flags_view
    from miles.objective.hooks import check_hooks
    from miles.observe.tracker import check_services

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
    from miles.training.checkpoint_files import recover_exports, remove_unfinished

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


def _resume_point(validated: Validated) -> tuple[ResumePoint, str | None]:
    """Return the point at which the run begins, and the checkpoint if it is a branch; print all notes about it."""
    from miles.run.checkpoints import check_same_steps
    from miles.run.remote_checkpoints import index_all
    from miles.run.resume import branch_of, check_frozen_models, check_load_folder, check_settings, resume_point

    settings = validated.settings
    given = settings.checkpoint
    print(host_line(settings))
    notes = [*validated.notes, *index_all(given, Path(settings.tracking.output_dir)), *check_load_folder(given)]
    if (fault := fault_of_nothing(given, settings.model.ref_load)) is not None:
        raise InputError(f"--load {given.load}: {'; '.join(fault)}")
    point = resume_point(given)
    check_same_steps(point.checkpoint, settings.steps_per_iteration)
    branch, branch_notes = branch_of(given)
    notes += [*point.notes, *branch_notes, *check_settings(point.checkpoint, settings)]
    for note in (*notes, *check_frozen_models(settings.model)):
        print(f"note: {note}")
    if validated.accepted:
        print("\n".join(["note: flags of the command that were accepted:", *_indented(validated.accepted)]))
    return point, branch


@contextmanager
def _locked(settings: Settings) -> Iterator[tuple[FolderLocks, RemoteLock | None]]:
    """Hold the locks of the folders that a run writes, for the length of the block; yield them."""
    from miles.base.locks import locked_folders, locked_in_remote_storage

    given = settings.checkpoint
    written = {"--output-dir": settings.tracking.output_dir, "--remote-cache": given.remote_cache}
    written |= {} if "save" in given.urls else {"--save": given.save}
    written |= {"--update-weight-disk-dir": settings.sglang.update_weight_disk_dir}
    folders = [(flag, Path(folder)) for flag, folder in written.items() if folder is not None]
    with (
        locked_folders(folders, None if "save_hf" in given.urls else given.save_hf) as local,
        locked_in_remote_storage(given.urls.get("save"), given.file_system_options) as remote,
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
    from miles.run.placement import Continuation, Restarts

    settings = validated.settings
    environment = dict(os.environ)  # before Ray's variables are in it
    given = settings.checkpoint if previous is None else previous.given
    restarts = Restarts(settings.cluster.max_restarts if previous is None else previous.restarts_left)

    def continuation(resumed: Settings) -> Continuation:
        again = LauncherState(
            replace(validated, settings=resumed, readings=(), surprises=(), accepted=()), given, restarts.left
        )
        return Continuation(f"{__name__}:take_over", again, environment)

    can_be_replaced = is_alone and not settings.cluster.ray_address  # nobody restarts a joined cluster
    again = continuation if can_be_replaced else None
    return RunContext(stop, files, notifier, restarts, given, validated.given, again)


def _indented(accepted: Sequence[Note]) -> list[str]:
    return [f"  {line}" for line in grouped(accepted)]


def run(settings: Settings, context: RunContext) -> None:
    """Start Ray, train, and stop what was started; restart up to ``--max-restarts`` times if a process fails.

    Args:
        settings: The run, with the checkpoint that it begins from and the folder that it saves into.
        context: What its attempts share.
    """
    from miles.run.placement import with_restarts
    from miles.run.session import EngineLayout, keeping_logs, ray_session

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
    from miles.run import stop_requests
    from miles.run.failures import stopped, stopped_by
    from miles.run.ray_watch import is_hang

    event: Event = "failure"
    status = 1
    checkpoint = _as_in_command(settings.checkpoint, context.given)
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
