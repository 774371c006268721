"""Tell a web address how a run goes: ``--notify-url``."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Literal

from miles.secret_values import hide_in_text

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
        secrets: What must not be sent.
    """

    def __init__(self, url: str | None, run: str, secrets: Collection[str] = ()) -> None:
        self._url = url
        self._run = run
        self._secrets = secrets

    def send(self, event: Event, what: str) -> None:
        """Post an event. Says so, once per failure, if that does not work."""
        if self._url is None:
            return
        import httpx  # lazily: most runs need none

        text = hide_in_text(f"{self._run}: {what}", self._secrets)[:LONGEST_TEXT]
        try:
            answer = httpx.post(self._url, json={"event": event, "run": self._run, "text": text}, timeout=SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fault = type(error).__name__
        else:
            if answer.is_success:
                return
            fault = f"status {answer.status_code}"
        print(f"note: --notify-url: the event '{event}' could not be sent ({fault})", file=sys.stderr)
