"""End a run that fails: print the message for the user, and choose the exit status."""

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray.exceptions

from miles.base.disk_faults import WriteFailed, fault_of_output
from miles.base.flags import flag_name
from miles.base.storage import is_url
from miles.base.text import InputError, few_lines, name_and_words, one_line, program, tell, words_of
from miles.config.checkpoint import NOT_OF_ITS_OWN, CheckpointArguments
from miles.engine.base import EngineFailed
from miles.observe.sinks import Notifier
from miles.run import stop_requests
from miles.run.failure_files import FailureFiles
from miles.run.liveness import DEATHS, ActorLost, how_it_died
from miles.run.remote_checkpoints import pending_in
from miles.run.stop_requests import StopRequests
from miles.tasks.rewards.scoring import RewardError
from miles.training.checkpoint_files import at, newest

_LONGEST_SENTENCE = 5000  # one about flags may list many names
_LONGEST_WORDS = 1000


@contextmanager
def exit_with_message(
    checkpoint: CheckpointArguments, stop: StopRequests, files: FailureFiles | None = None
) -> Iterator[None]:
    """Turn whatever ends a run into an exit status and a message that states why and how to resume.

    A ``ValueError``, from any process, is a mistake that the user can fix and is printed as one sentence; the status is
    2 if it is about the user's input, an ``InputError``. Any other error shows the traceback of the process that
    failed.

    Args:
        checkpoint: The flags of checkpoints, for the words on how to resume.
        stop: Knows which signal has stopped the run.
        files: The files kept of the failure, for the last line.

    Raises:
        SystemExit: With the status of the signal that stopped the run (stop_requests.py), with 2 for an
            ``InputError``, else with 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(stopped_by(stop, checkpoint), file=sys.stderr)
        raise SystemExit(stop.exit_status) from None
    except Exception as error:
        if (fault := fault_of_output(error)) is not None:
            print(stopped(fault, checkpoint), file=sys.stderr)
            raise SystemExit(1) from None
        cause = cause_of(error)
        if stop.has_stopped and is_death(error):  # the signal has ended the worker too
            print(stopped_by(stop, checkpoint), file=sys.stderr)
            raise SystemExit(stop.exit_status) from None
        if isinstance(cause, ValueError):
            tell(few_lines(f"error: {words_of(cause)}", limit=_LONGEST_SENTENCE))
            if isinstance(cause, InputError):
                raise SystemExit(2) from None
        elif isinstance(cause, RewardError):
            lines = [f"error: {cause}", *getattr(cause, "__notes__", ())]
            tell(few_lines("\n".join(lines), limit=_LONGEST_SENTENCE))
            print(stopped("the reward function failed (above)", checkpoint, files), file=sys.stderr)
        elif isinstance(cause, WriteFailed):
            print(stopped(str(cause), checkpoint), file=sys.stderr)
        elif isinstance(cause, EngineFailed):
            print(stopped(one_line(str(cause), _LONGEST_WORDS), checkpoint, files), file=sys.stderr)
        else:
            show(error)
            print(stopped(in_one_line(error), checkpoint, files), file=sys.stderr)
        raise SystemExit(1) from None


@contextmanager
def notifying(notifier: Notifier, stop: StopRequests) -> Iterator[None]:
    """Send the end of the block, or its failure, to ``--notify-url``."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, KeyboardInterrupt) or (stop.has_stopped and is_death(error)):
            notifier.send("end", f"stopped by {signal.Signals(stop.number).name}")
        else:
            notifier.send("failure", in_one_line(error))
        raise
    notifier.send("end", "finished")


def stopped_by(stop: StopRequests, checkpoint: CheckpointArguments) -> str:
    """Return the last line of a run that a signal has stopped."""
    who = "the user" if stop.number == signal.SIGINT else signal.Signals(stop.number).name
    return f"stopped by {who}; {how_to_resume(checkpoint)}"


def is_death(error: Exception) -> bool:
    """Return whether an error is that a worker process died or does not answer."""
    return isinstance(error, (ActorLost, *DEATHS))


def is_stopped_soon(stop: StopRequests) -> bool:
    """Return whether a signal stops the run that has ended a worker too: the launcher may see that death first."""
    return stop.stopped_within(stop_requests.SIGNAL_SECONDS)


def stopped(why: str, checkpoint: CheckpointArguments, files: FailureFiles | None = None) -> str:
    """Return the last line of a run that has failed: why, how to resume, and which files of the failure were kept."""
    ending = "" if files is None else files.in_words()
    return f"{program()}: the run stopped: {why}; {how_to_resume(checkpoint)}{ending}"


def cause_of(error: Exception) -> BaseException:
    """Return the original error of the process that failed."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error


def show(error: Exception) -> None:
    """Print the traceback of the process that failed, not the launcher's own if the failure is elsewhere."""
    if isinstance(error, ActorLost):
        text = "" if error.__cause__ is None else str(error.__cause__)
    elif isinstance(error, ray.exceptions.RayError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception(error))
    if text:
        print(few_lines(text), file=sys.stderr)


def in_one_line(error: Exception) -> str:
    """Return the failure as the end of a sentence."""
    if isinstance(error, ActorLost):
        return str(error)
    if isinstance(error, DEATHS):
        return f"a worker process died ({how_it_died(error)}; Ray's message is above)"
    cause = cause_of(error)
    return one_line(name_and_words(cause).splitlines()[0], _LONGEST_WORDS)


def how_to_resume(checkpoint: CheckpointArguments) -> str:
    """Return how to resume a run that ended early, or the starting point of the next run.

    Args:
        checkpoint: The flags of the command; the flags of a run that resumed on its own would not show what to leave
            out.
    """
    again = "a new run starts from the beginning"
    if checkpoint.load is not None and _may_have_checkpoint(checkpoint.local(checkpoint.load)):
        again = f"the same command starts from --load {checkpoint.load} again"
    if checkpoint.save is None:
        return f"nothing was saved (no --save), so {again}"
    local = checkpoint.local(checkpoint.save)
    # A run that begins from other weights: from its own checkpoints it continues whole (loading_its_own).
    dropped = [flag_name(name) for name in NOT_OF_ITS_OWN if getattr(checkpoint, name)]
    without = f" and without {' and '.join(dropped)}" if dropped else ""
    what_to_do = f"the same command with --load {checkpoint.save}{without} continues from the last checkpoint"
    try:
        last = newest(local)
    except OSError as error:
        return f"{what_to_do}, once {local} can be read again (now: {error.strerror or error})"
    if last is None:
        return f"no checkpoint was saved in {checkpoint.save} yet, so {again}"
    if is_url(checkpoint.save) and (pending := pending_in(local)):
        return f"{what_to_do}, {pending[-1].name}, which it uploads from {local} first"
    return what_to_do


def _may_have_checkpoint(folder: Path) -> bool:
    try:
        return at(folder) is not None
    except OSError:  # it cannot be read now
        return True
