"""``--max-restarts``: restart a run from its last checkpoint, after a worker process or the run's own Ray has died.

After the death of a worker, the launcher starts the workers again in the same Ray. If Ray itself is lost, its calls
may wait for ever or end the process, so the launcher becomes another program, in the same process: a launcher that
starts another Ray and resumes.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import ray
import ray.exceptions

from miles.base.disk_faults import WriteFailed, reading
from miles.base.text import program, tell
from miles.config.checkpoint import NOT_OF_ITS_OWN
from miles.config.settings import Settings
from miles.run.failure_files import FailureFiles
from miles.run.failures import cause_of, in_one_line, is_death, is_stopped_soon, show
from miles.run.resume import resume_point
from miles.run.stop_requests import StopRequests
from miles.training.checkpoint_files import newest


@dataclass
class Restarts:
    """How many restarts a run has left."""

    left: int

    def take(self, why: str, settings: Settings, files: FailureFiles) -> Settings:
        """Use one, and return ``settings`` changed to resume from the run's last checkpoint; reports it.

        Args:
            why: The error that ended the run.
            settings: The attempt that has ended.
            files: The files kept of its failure.

        Raises:
            ValueError: If everything that the run has saved is damaged.
        """
        resumed, notes = resuming(settings)
        for note in notes:
            print(f"note: {note}")
        start = "its last checkpoint" if resumed.checkpoint.load else "the beginning, as nothing was saved yet"
        self.left -= 1
        tell(f"{why}; restarting from {start} ({self.left} restarts left){files.in_words()}")
        files.next_attempt()
        return resumed


def with_restarts(
    settings: Settings,
    attempt: Callable[[Settings], None],
    restarts: Restarts,
    files: FailureFiles,
    stop: StopRequests,
) -> None:
    """Call ``attempt(settings)``, and again if a worker process dies or fails, as often as ``restarts`` allows.

    Every further attempt resumes the newest checkpoint in ``--save``, or starts from the beginning if there is none.
    ``attempt`` leaves no process behind, however it ends. A ``ValueError`` and a full disk, which the user
    has to fix, and a failure of the launcher itself are raised at once.

    Args:
        settings: The run.
        attempt: Runs it to its end.
        restarts: How many are left.
        files: The files that are kept of a failure.
        stop: Requests to stop the run, after which it is not restarted.
    """
    while True:
        try:
            return attempt(settings)
        except ray.exceptions.RayError as error:
            is_stopping = stop.is_requested or (is_death(error) and is_stopped_soon(stop))
            if restarts.left == 0 or is_stopping or isinstance(cause_of(error), ValueError | WriteFailed):
                raise
            show(error)
            files.keep_ray_logs()
            settings = restarts.take(in_one_line(error), settings, files)


def resuming(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return ``settings`` changed to resume from its last whole checkpoint, and notes; unchanged if none was saved.

    Raises ``ValueError`` if everything it has saved is damaged.
    """
    resumed = loading_its_own(settings)
    if resumed is settings:
        return settings, ()
    point = resume_point(resumed.checkpoint)
    return replace(resumed, checkpoint=point.checkpoint), point.notes


def loading_its_own(settings: Settings) -> Settings:
    """Return ``settings`` changed to load from ``--save``; unchanged if nothing was saved.

    Raises ``ValueError`` if the folder cannot be read.
    """
    section = settings.checkpoint
    with reading(f"--save {section.save}"):
        if section.save is None or newest(section.local(section.save)) is None:
            return settings
    whole: dict[str, Any] = dict.fromkeys(NOT_OF_ITS_OWN, False)
    return replace(settings, checkpoint=replace(section, load=section.save, **whole))


class Continuation:
    """A program that replaces this one in its process.

    Args:
        function: ``module:function``, which is called with ``state`` and exits.
        state: Anything that can be pickled. It passes through memory: no file and no command line shows it.
        environment: The environment variables of the program.
    """

    def __init__(self, function: str, state: Any, environment: Mapping[str, str]) -> None:
        self._function = function
        self._state = pickle.dumps(state)
        self._environment = dict(environment)

    def take_over(self, output: Mapping[int, int]) -> NoReturn:
        """Become the program. Its standard output and error are those that ``output`` names by their numbers."""
        state = os.memfd_create("miles-continuation")
        os.write(state, self._state)
        module, name = self._function.split(":")
        code = "import sys, json; [each.reconfigure(errors='backslashreplace') for each in (sys.stdout, sys.stderr)]; "
        code += "state, path = sys.argv[1:]; sys.path[:] = json.loads(path); "
        code += f"sys.argv = {program().split()}; from {module} import {name}; "
        code += f"from {__name__} import handed_over; {name}(handed_over(int(state)))"
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                _close_later(number)
        for number, copy in output.items():
            os.dup2(copy, number)
        os.set_inheritable(state, True)
        words = [sys.executable, "-c", code, str(state), json.dumps([path or os.getcwd() for path in sys.path])]
        os.execve(sys.executable, words, self._environment)


def handed_over(file: int) -> Any:
    """Return the state of a ``Continuation`` in the program that took over."""
    with os.fdopen(file, "rb") as state:
        state.seek(0)
        return pickle.load(state)


def _close_later(file: int) -> None:
    """Have the next program not inherit ``file``: libraries open some for all programs."""
    try:
        os.set_inheritable(file, False)
    except OSError:  # it was closed meanwhile
        return
