"""Tell a web address how a run goes: ``--notify-url``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Literal

from miles.base.secret_values import hide_in_text

SECONDS = 10.0  # for one notification
LONGEST_TEXT = 1000

Event = Literal["end", "failure", "unhealthy"]


class Notifier:
    """Post one JSON object per event: ``{"event": …, "run": …, "text": …}``.

    ``text`` is a sentence for people, which names the run; chat services show it. An address that cannot be reached
    does not stop a run.

    Args:
        url: The address; None sends nothing. It may hold a token, so it is never printed.
        run: The output folder of the run.
        secrets: Texts that must not be sent.
    """

    def __init__(self, url: str | None, run: str, secrets: Collection[str] = ()) -> None:
        self._url = url
        self._run = run
        self._secrets = secrets

    def send(self, event: Event, what: str) -> None:
        """Post an event. Raises nothing: a note says if that does not work."""
        if self._url is None:
            return
        try:
            import httpx  # lazily: most runs need none

            text = hide_in_text(f"{self._run}: {what}", self._secrets)[:LONGEST_TEXT]
            body = {"event": event, "run": _encodable(self._run), "text": _encodable(text)}
            answer = httpx.post(self._url, json=body, timeout=SECONDS)
            fault = None if answer.is_success else f"status {answer.status_code}"
        except Exception as error:  # the run, or what has ended it, matters more
            fault = type(error).__name__
        if fault is not None:
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(f"note: --notify-url: the event '{event}' could not be sent ({fault})", file=sys.stderr)


def _encodable(text: str) -> str:
    """Return ``text`` with escapes for lone surrogates, which UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()
