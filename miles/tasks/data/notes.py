"""Count the unusual rows of a source: one line for each kind, with the place of the first."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)


class Notes:
    """Counts unusual rows that are allowed, by kind."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, where: str) -> None:
        """Count the row at ``where`` under ``kind``, which describes what is unusual about it."""
        self.add_all(kind, 1, where)

    def add_all(self, kind: str, rows: int, where: str) -> None:
        """Count many rows, which begin at ``where``."""
        times, first = self._found.get(kind, (0, where))
        self._found[kind] = times + rows, first

    def log_new(self, other: Notes) -> None:
        """Log the kinds of ``other`` that are not here yet, and count them: for rows without end, a line per kind."""
        for kind, (rows, where) in other._found.items():
            if kind not in self._found:
                _logger.warning("%s: %s; later rows like it are not reported", where, kind)
            self.add_all(kind, rows, where)

    def log(self, source: str, total: int) -> None:
        """Log a line for each kind."""
        for kind, (times, first) in self._found.items():
            _logger.warning("%s: %d of %d prompts: %s; the first is %s", source, times, total, kind, first)
