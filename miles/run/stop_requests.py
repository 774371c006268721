"""Signals that stop a run, and the work that is finished first.

    signal                          what happens                                              exit status
    SIGINT (Ctrl-C) once            generation is abandoned; an iteration that is training    130
                                    is finished; with --save a checkpoint is written
    SIGTERM, SIGHUP once            the same                                                  143, 129
    SIGQUIT, SIGABRT once           the same                                                  131, 134
    any of these, a second time     the run stops at its last checkpoint                      the same
    SIGUSR1 (Slurm's warning)       the iteration is finished and saved                       0

While Ray starts, the first is handled when it has started, and a second one ends the launcher at once.

All of this takes at most ``--stop-timeout`` seconds; then the run stops at its last checkpoint. A SIGHUP that is
ignored (``nohup``) stays ignored; a SIGINT that is (``nohup … &`` in a script) is obeyed while a run is active, since
whoever sends it means the run. A program that aborts itself ends at once, as abort() sees to it. Handlers run in the
main thread, which waits for actors in short steps.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
import signal
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from miles.base.text import tell

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT)
SIGNAL_SECONDS = 2.0  # within which a signal that has ended processes of the run reaches the launcher too


class StopRequested(KeyboardInterrupt):
    """A signal asked the run to stop.

    Catch ``KeyboardInterrupt``: during its calls, Ray raises a plain one instead of a handler's exception, and treats
    any other exception as an error. ``StopRequests.number`` is the signal.
    """


class StopRequests:
    """Receives the signals; the main loop states which work must be finished first."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._requested: int | None = None
        self._must_finish = False
        self._only_notes = False
        self._arrived: socket.socket | None = None  # the numbers of signals, as soon as they have arrived

    @contextmanager
    def listening(self, is_last: bool = False) -> Iterator[StopRequests]:
        """Handle the signals during the block, and restore the former handlers.

        Python lets only the main thread handle signals. A run in another one is not stopped by them.

        Args:
            is_last: Whether the process ends after the block. A signal that comes then changes nothing, neither the
                output nor the status; a second one ends the process at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        if is_last:
            atexit.register(ignore_stops)  # Python would give them back their default actions in its last moment
        handlers: dict[int, Callable[[int, FrameType | None], Any]] = {number: self._stop for number in STOPS}
        handlers |= {signal.SIGUSR1: self._warn, signal.SIGALRM: self._time_out}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._arrived, arriving = socket.socketpair()
        self._arrived.setblocking(False)
        arriving.setblocking(False)
        former_file = signal.set_wakeup_fd(arriving.fileno(), warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.set_wakeup_fd(former_file)
            arriving.close()
            self._arrived.close()
            self._arrived = None
            for number, handler in former.items():
                signal.signal(number, self._let_end if is_last and number in STOPS else handler)

    def _let_end(self, number: int, frame: FrameType | None) -> None:
        """Let the process, whose run has ended, end in its own time."""
        signal.signal(number, signal.SIG_DFL)

    @property
    def number(self) -> int:
        """The signal that asked the run to stop; SIGINT if none did."""
        return signal.SIGINT if self._requested is None else self._requested

    @property
    def exit_status(self) -> int:
        """The shell's convention for a process that a signal ended; 0 after the warning SIGUSR1."""
        return 0 if self.number == signal.SIGUSR1 else 128 + self.number

    @property
    def is_requested(self) -> bool:
        """Whether a signal asked the run to stop once the work that must be finished is done."""
        return self._requested is not None

    @property
    def has_stopped(self) -> bool:
        """Whether a signal other than the warning SIGUSR1 asked the run to stop."""
        return self._requested in STOPS

    def stopped_within(self, seconds: float, *, only_notes: bool = False) -> bool:
        """Return whether a signal stops the run, now or within so many seconds.

        A signal to all processes of a run ends Ray too, whose death may be seen before Python has called the handler
        here, in the main thread.

        Args:
            seconds: How long to wait.
            only_notes: Whether this signal and later ones are only noted, as this process is about to end.
        """
        self._only_notes = self._only_notes or only_notes
        until = time.monotonic() + seconds
        while not self.has_stopped and self._arrived is not None and (left := until - time.monotonic()) > 0:
            if select.select([self._arrived], [], [], left)[0]:
                numbers = [number for number in self._arrived.recv(64) if number in STOPS]
                self._requested = numbers[0] if numbers else self._requested
        return self.has_stopped

    @contextmanager
    def finish_first(self) -> Iterator[None]:
        """Run a block that a first signal does not interrupt."""
        self._must_finish = True
        try:
            yield
        finally:
            self._must_finish = False

    def end_run(self) -> None:
        """Raise ``StopRequested``, after the work that had to be finished."""
        raise StopRequested

    def _stop(self, number: int, frame: FrameType | None) -> None:
        again = self._requested in STOPS
        self._requested = number
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        if self._only_notes:
            return
        if again or not self._must_finish:
            if not again:
                self._start_timer()  # a checkpoint may follow
            raise StopRequested
        self._start_timer()
        tell(
            f"{signal.Signals(number).name}: finishing the iteration that is training, for up to "
            f"{self._seconds:g} s (--stop-timeout); a second signal stops at the last checkpoint"
        )

    def _warn(self, number: int, frame: FrameType | None) -> None:
        if self._requested is None:
            self._requested = number
            tell("SIGUSR1: stopping at the end of this iteration")

    def _start_timer(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def _time_out(self, number: int, frame: FrameType | None) -> None:
        if not self._only_notes:
            tell(f"{self._seconds:g} s (--stop-timeout) have passed: what is not saved by now is lost")
            raise StopRequested


@contextmanager
def stops_later(at_the_second: Callable[[int], None]) -> Iterator[None]:
    """Handle the first signal of ``STOPS`` when the block has ended, also if it failed.

    Args:
        at_the_second: Called with the number of a second one at once, in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if len(arrived) > 1:
            at_the_second(number)

    # A signal that no Python function handles is ignored, or ends this process without raising.
    former = {number: handler for number in STOPS if callable(handler := signal.getsignal(number))}
    for number in former:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def ignore_stops() -> None:
    """Ignore ``STOPS`` in this process, and in the program that it may become."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _leave_closed_terminal() -> None:
    """Send output nowhere if it goes to a terminal that was closed, where each further line would be an error."""
    for number in (1, 2):
        try:
            termios.tcgetattr(number)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # ENOTTY: a file or a pipe
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
