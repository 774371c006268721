"""The error about something that the user has given: a flag, a file, a row."""

from __future__ import annotations


class InputError(ValueError):
    """Report a fault in flags, data or files in one sentence. The program ends with exit code 2."""
