"""Progress on a terminal: of a long phase ("generate  37 of 64 groups"), and of loading before the first phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.status import Status

from miles.base.one_line import one_line

SECONDS = 1.0  # between two questions

Details = Mapping[str, Callable[[], str | None]]  # by phase; None: not known


class PhaseProgress:
    """Shows the progress of the current phase, which a thread asks for every second.

    Args:
        details: The function to ask in each phase. It must return soon.
        show: Shows the phase and the answer.
        note: Prints a sentence, once per phase whose question has failed. The run continues, and so do the questions.
        seconds: The time between two questions.
    """

    def __init__(
        self, details: Details, show: Callable[[str], None], note: Callable[[str], None], seconds: float = SECONDS
    ) -> None:
        self._details = details
        self._show = show
        self._note = note
        self._noted: set[str] = set()  # phases
        self._seconds = seconds
        self._phase: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phase-progress", daemon=True)
        self._thread.start()

    def enter(self, phase: str | None) -> None:
        """Begin a phase; None ends it."""
        self._phase = phase

    def close(self) -> None:
        """Stop asking."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            phase = self._phase
            if phase is not None and phase in self._details:
                answer = self._ask(phase)
                if answer is not None and phase == self._phase:
                    self._show(f"{phase}  {answer}")

    def _ask(self, phase: str) -> str | None:
        try:
            return self._details[phase]()
        except Exception as error:  # whatever it is, the work itself reports it
            if phase not in self._noted:
                self._noted.add(phase)
                reason = one_line(f"{type(error).__name__}: {error}", 200)
                self._note(f"note: how far {phase} is cannot be shown ({reason})")
            return None


class Loading:
    """Names on a terminal what a run does before its first phase, with a sign of life; elsewhere it prints nothing.

    Args:
        log_format: ``--log-format``: only ``text`` shows it.
        console: Replaceable for tests.
    """

    def __init__(self, log_format: str, console: Console | None = None) -> None:
        shown = console or Console()
        self._status: Status | None = None
        if shown.is_terminal and log_format == "text":
            self._status = shown.status("loading")
            self._status.start()

    def show(self, what: str) -> None:
        """Name what is done from now on."""
        if self._status is not None:
            self._status.update(f"loading: {what}")

    def close(self) -> None:
        """Remove the line. Closing twice is harmless."""
        if self._status is not None:
            self._status.stop()

    def __enter__(self) -> Loading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
