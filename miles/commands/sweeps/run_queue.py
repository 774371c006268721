"""Run commands, some at once: each in a separate process with its share of the machine; a failed one once more.

One thread per slot starts and awaits processes; it is bound to the cores of its slot, and a process inherits the cores
of the thread that starts it. The main thread receives what happens, and signals, and reports both.

    signal that stops a run, to the sweep    what happens
    once                                     nothing more is started; the running commands get SIGTERM, at which a
                                             training run finishes its iteration and saves (unless it shares GPUs with
                                             its engines)
    a second time                            they get it again: a training run stops at its last checkpoint
    a third time                             they are killed
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from miles.base.flags import FlagError, count
from miles.base.host import cpu_quota, has_gpu
from miles.base.processes import importing_miles
from miles.base.secrets import public_words
from miles.base.text import one_line
from miles.commands.sweeps.swept_run import Attempt, SweptRun
from miles.config.settings import Settings
from miles.observe.console import in_words
from miles.run.stop_requests import STOPS

# Slots for runs at once: each has its share of the cores, and its own GPUs as far as there are enough.


VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """A slot for one run at once.

    Attributes:
        cores: The cores that its run may use.
        gpus: The GPUs that its run sees, as CUDA_VISIBLE_DEVICES names them; None: whatever this process sees.
    """

    cores: frozenset[int]
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that limit a run to it."""
        return {} if self.gpus is None else {VISIBLE: ",".join(self.gpus)}

    def __str__(self) -> str:
        cores = count(len(self.cores), "core")
        return cores if self.gpus is None else f"{cores} and GPU {','.join(self.gpus)}"


@dataclass(frozen=True)
class Machine:
    """What this process may use: cores by number, how many of them it may keep busy, and GPUs."""

    cores: tuple[int, ...]
    busy: float
    gpus: tuple[str, ...]

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Machine:
        """Look at this machine."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        nodes = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        gpus = tuple(map(str, range(len(nodes))))
        if VISIBLE in environment:
            gpus = tuple(filter(None, (part.strip() for part in environment[VISIBLE].split(","))))
        return cls(cores, min(len(cores), cpu_quota() or len(cores)), gpus)


def devices_of(settings: Settings) -> int:
    """Return the devices of a run: the trainer's and, unless they share, the devices for generation."""
    trainer = settings.cluster.world_size if settings.trains else 0
    if settings.cluster.colocate:
        return trainer
    return trainer + (settings.engine_devices if settings.num_engines else 1)


def slots(jobs: int | None, runs: Sequence[Settings], machine: Machine) -> list[Slot]:
    """Return the slots for runs at once.

    Args:
        jobs: How many, ``--jobs``; by default as many as have devices of their own. On CPU a device is a core. Runs on
            a cluster, or with engines that are running already, are one by one by default.
        runs: The settings of the runs.
        machine: What there is.

    Raises:
        FlagError: A run needs more GPUs than there are, or several at once would write their weights to one engine.
    """
    needed = max(devices_of(settings) for settings in runs)
    joined = any(settings.cluster.ray_address is not None for settings in runs)
    devices = {settings.cluster.device for settings in runs}
    uses_gpus = not joined and ("cuda" in devices or ("auto" in devices and has_gpu()))
    if uses_gpus and needed > len(machine.gpus):
        what_to_do = "lower --actor-num-gpus-per-node or --rollout-num-gpus, add --colocate, or use another machine"
        raise FlagError(f"a run needs {count(needed, 'GPU')} and this machine has {len(machine.gpus)}; {what_to_do}")
    share_engines = sum(settings.sglang.rollout_external and settings.generates for settings in runs) > 1
    if share_engines and jobs is not None and jobs > 1:
        rule = "all runs write their weights to the engines of --rollout-external, so only one may run at once"
        raise FlagError(f"--jobs {jobs}: {rule}; give --jobs 1, or drop --rollout-external")
    if jobs is None:
        there = len(machine.gpus) if uses_gpus else int(machine.busy)
        jobs = 1 if joined or share_engines else max(1, there // needed)
    jobs = min(jobs, len(runs))
    result = []
    for number in range(jobs):
        gpus = None
        if uses_gpus:
            gpus = tuple(machine.gpus[(number * needed + k) % len(machine.gpus)] for k in range(needed))
        result.append(Slot(_share(machine.cores, number, jobs), gpus))
    return result


def _share(cores: Sequence[int], number: int, among: int) -> frozenset[int]:
    """Return an even share of the cores; one core, which others have too, if there are more shares than cores."""
    if among > len(cores):
        return frozenset({cores[number % len(cores)]})
    return frozenset(cores[number * len(cores) // among : (number + 1) * len(cores) // among])


# How the queue starts a command: as a process, or as a fork of one process that has imported everything already.
#
# A training run needs seconds to import what it uses. A fork has it at once, and shares its memory.


# Starts a command from its words, its log and its environment, in a separate session. Returns its process id, and the
# function that waits for its end and returns its exit status, negative for the signal that ended it.
Starter = Callable[[Sequence[str], Path, Mapping[str, str]], tuple[int, Callable[[], int]]]


def start_process(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> tuple[int, Callable[[], int]]:
    """Start a process; it inherits the cores of the calling thread.

    Args:
        words: The program and its arguments.
        log: The file to which it appends its output.
        environment: All of its variables.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal reaches only the sweep
        )
    return process.pid, process.wait


class Forks:
    """Starts commands as forks of one process, which imports some modules before the first of them."""

    def __init__(self, prefix: Sequence[str], function: Callable[[list[str]], object], modules: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            prefix: The words that every command begins with, and that are not passed on.
            function: Called in each fork with the other words; a function of a module. It raises SystemExit for a
                status other than 0.
            modules: Imported once. They must not start threads, which a fork would lack.
        """
        self._prefix = list(prefix)
        self._function = function
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*modules])
        self._lock = threading.Lock()  # the lists of multiprocessing are not made for several threads

    def __call__(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> tuple[int, Callable[[], int]]:
        """Start a fork on the cores of the calling thread; as ``start_process``."""
        begin = len(self._prefix)
        assert list(words[:begin]) == self._prefix, "the function stands for these words"
        cores = frozenset(os.sched_getaffinity(0))
        process = self._context.Process(
            target=_run, args=(self._function, list(words[begin:]), str(log), dict(environment), cores)
        )
        with self._lock:
            process.start()
        assert process.pid is not None, "it has started"

        def wait() -> int:
            process.join()
            assert process.exitcode is not None
            return process.exitcode

        return process.pid, wait


def _run(
    function: Callable[[list[str]], object], words: list[str], log: str, environment: dict[str, str], cores: set[int]
) -> None:
    """Do the first steps of a new process, and call the function."""
    os.setsid()
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks ignores it
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    try:
        function(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


TICK_SECONDS = 1.0
WRONG_FLAGS = 2  # exit status of a command that would fail again


@dataclass
class Ended:
    """How a queue ended.

    Attributes:
        finished: The tasks that came to their end.
        failed: The tasks that failed twice, with the last attempt of each.
        signal: The signal that stopped the queue; None if none did.
    """

    finished: list[SweptRun] = field(default_factory=list)
    failed: list[tuple[SweptRun, Attempt]] = field(default_factory=list)
    signal: int | None = None


class RunQueue:
    """Does runs in order, one by one in each of its slots.

    Args:
        runs: The runs, in order.
        slots: One run at once in each.
        progress: Told what happens, in the main thread.
        start: Starts the command of a run.
    """

    def __init__(
        self, runs: Sequence[SweptRun], slots: Sequence[Slot], progress: SweepProgress, start: Starter = start_process
    ) -> None:
        self._start = start
        self._waiting = deque(runs)
        self._slots = slots
        self._progress = progress
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # called by the main thread
        self._lock = threading.Lock()  # held to start processes and to signal them, so that none is missed
        self._running: set[int] = set()  # process ids
        self._is_stopping = False
        self._signals = 0
        self._ended = Ended()

    def run(self) -> Ended:
        """Do all runs; return when none is running any more."""
        with ThreadPoolExecutor(len(self._slots), "sweep") as threads, self._listening():
            working = {threads.submit(self._work, slot) for slot in self._slots}

            def end(thread: Future[None]) -> None:
                working.remove(thread)
                thread.result()  # raises what stopped it

            for each in list(working):
                each.add_done_callback(lambda thread: self._events.put(partial(end, thread)))
            try:
                while working:
                    try:
                        event = self._events.get(timeout=TICK_SECONDS)
                    except queue.Empty:
                        event = self._progress.tick
                    event()
            except BaseException:
                self._stop(signal.SIGTERM)
                raise
        return self._ended

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Turn signals into events. A SIGHUP that is ignored (``nohup``) stays ignored."""

        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(partial(self._signalled, number))

        numbers = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        former = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        self._signals += 1
        self._ended.signal = number
        running = self._stop(signal.SIGTERM if self._signals < 3 else signal.SIGKILL)
        self._progress.stopping(number, self._signals, running)

    def _stop(self, number: int) -> int:
        """Start nothing more, and send a signal to all running processes; return how many there are."""
        with self._lock:
            self._is_stopping = True
            for pid in self._running:
                with suppress(ProcessLookupError):  # it has ended, and its status is on the way
                    os.kill(pid, number)
            return len(self._running)

    def _work(self, slot: Slot) -> None:
        """Do runs in one slot until none is waiting: a thread."""
        os.sched_setaffinity(0, slot.cores)  # of this thread, and of the processes that it starts
        while (run := self._next()) is not None:
            for is_last in (False, True):
                attempt = self._attempt(run, slot)
                if attempt is None:
                    break
                is_finished = attempt.status == 0 and run.is_finished
                if is_finished or is_last or self._is_stopping or attempt.status == WRONG_FLAGS:
                    self._events.put(partial(self._end, run, attempt, is_finished))
                    break
                self._events.put(partial(self._progress.repeats, run, attempt))

    def _end(self, run: SweptRun, attempt: Attempt, is_finished: bool) -> None:
        if is_finished:
            self._ended.finished.append(run)
        elif self._ended.signal is None:
            self._ended.failed.append((run, attempt))
        self._progress.ended(run, attempt, is_finished)

    def _next(self) -> SweptRun | None:
        with self._lock:
            return None if self._is_stopping or not self._waiting else self._waiting.popleft()

    def _attempt(self, run: SweptRun, slot: Slot) -> Attempt | None:
        """Start the command of a run once, and wait for it; None if the queue is stopping."""
        run.begin()
        words = run.command()
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        clock = time.monotonic()
        with run.log.open("ab") as log:
            log.write(f"--- {began} {shlex.join(public_words(words))}\n".encode())
            position = log.tell()
        with self._lock:
            if self._is_stopping:
                return None
            pid, wait = self._start(words, run.log, {**os.environ, **importing_miles(), **slot.environment})
            self._running.add(pid)
        self._events.put(partial(self._progress.started, run))
        status = wait()
        with self._lock:
            self._running.remove(pid)
        attempt = Attempt(began, time.monotonic() - clock, status, last_line(run.log, position))
        run.note(attempt)
        return attempt


def last_line(log: Path, begin: int, most: int = 1 << 16) -> str:
    """Return the last line of a log that is not empty, from position ``begin`` on and of its last ``most`` bytes."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - most))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((one_line(line.strip(), 500) for line in reversed(lines) if line.strip()), "")


# The output of a sweep while it runs: a line for every run that ends, how many are left, and for how long.


class SweepProgress:
    """Prints what happens in a queue; on a terminal also a bar.

    Args:
        runs: The runs that are to be done.
        finished: How many runs are finished already.
        console: Where to print.
        clock: Seconds, as ``time.monotonic``.
    """

    def __init__(
        self,
        runs: Sequence[SweptRun],
        finished: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._began = clock()
        self._total = len(runs) + finished
        self._finished = finished
        self._begun_with = {run: run.fraction() for run in runs}
        self._to_do = sum(1 - share for share in self._begun_with.values())  # in whole runs, as is _done
        self._done = 0.0  # by runs that have finished
        self._running: list[SweptRun] = []
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._console)
            self._task = self._bar.add_task("", total=self._total, completed=finished)
            self._bar.start()

    def close(self) -> None:
        """Release the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def started(self, run: SweptRun) -> None:
        """Show a run that begins."""
        self._running.append(run)
        self.tick()

    def ended(self, run: SweptRun, attempt: Attempt, is_finished: bool) -> None:
        """Print that a run has ended for good, and how much is left."""
        self._running.remove(run)
        self._finished += is_finished
        if is_finished:
            self._done += 1 - self._begun_with[run]
            what = f"finished in {in_words(attempt.seconds)}"
        else:
            self._to_do -= 1 - self._begun_with[run]
            what = f"{_how(attempt.status)}: {attempt.last_line} ({run.log})"
        left = self._seconds_left()
        more = "" if left is None or left < 0.5 else f"; about {in_words(left)} left"
        self._print(f"[{self._finished}/{self._total}] {run.name}: {what}{more}")
        self.tick()

    def repeats(self, run: SweptRun, attempt: Attempt) -> None:
        """Print that a run failed and is tried once more."""
        self._running.remove(run)
        text = f"{_how(attempt.status)}: {attempt.last_line} ({run.log}); trying once more: it {run.in_words()}"
        self._print(f"[{self._finished}/{self._total}] {run.name}: {text}")

    def stopping(self, number: int, times: int, running: int) -> None:
        """Print the effect of a signal."""
        name = signal.Signals(number).name
        runs = count(running, "run")
        if times == 1:
            text = f"{name}: stopping; waiting for {runs} to finish an iteration and save (a second signal: sooner)"
        elif times == 2:
            text = f"{name}: stopping {runs} at the last checkpoint (a third signal kills)"
        else:
            text = f"{name}: killing {runs}"
        self._print(text)

    def tick(self) -> None:
        """Bring the bar up to date."""
        if self._bar is not None:
            left = self._seconds_left()
            names = ", ".join(f"{run.name} {run.fraction():.0%}" for run in self._running)
            description = names + ("" if left is None else f"  left {in_words(left)}")
            self._bar.update(self._task, completed=self._finished, description=description)

    def _seconds_left(self) -> float | None:
        """Foresee the end from the speed of the queue so far; None as long as nothing is done."""
        done = self._done + sum(max(0.0, run.fraction() - self._begun_with[run]) for run in self._running)
        return max(0.0, self._to_do - done) * (self._clock() - self._began) / done if done else None

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def summary(ended: Ended, unfinished: int, again: str) -> str:
    """Return the last lines: what failed, and how to continue.

    Args:
        ended: How the queue ended.
        unfinished: Runs that are not finished.
        again: The command that continues.
    """
    lines = []
    if ended.failed:
        lines.append(f"{count(len(ended.failed), 'run')} failed:")
        for run, attempt in ended.failed:
            lines.append(f"  {run.name}: {_how(attempt.status)}: {attempt.last_line} ({run.log})")
    if unfinished:
        runs = "1 run is" if unfinished == 1 else f"{unfinished} runs are"
        lines.append(f"{runs} not finished; {again} continues, and runs nothing again that is finished")
    return "\n".join(lines)


def _how(status: int) -> str:
    """Say how a process ended."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return "ended before its last step" if status == 0 else f"failed with status {status}"
