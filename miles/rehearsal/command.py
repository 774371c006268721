"""The command: ``--rehearse``, and ``miles rehearse``."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from miles.arguments.validate import Validated
from miles.rehearsal.page import as_page
from miles.rehearsal.rehearsal import advise, rehearse_settings
from miles.rehearsal.report import as_json, as_text
from miles.rehearsal.trace_all import Tracers


def rehearse(validated: Validated) -> int:
    """Print what the run of ``validated`` settings will need, and write the files that were asked for.

    Returns:
        0; 2 if the model or a flag cannot be rehearsed, with the reason on stderr.
    """
    settings = validated.settings
    for note in validated.notes:
        print(f"note: {note}")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    began = time.perf_counter()
    try:
        with Tracers() as tracers:
            rehearsal = rehearse_settings(settings, tracers)
            advice = list(advise(rehearsal, tracers))
    except ValueError as error:
        print(f"miles: error: {error}", file=sys.stderr)
        return 2
    elapsed = time.perf_counter() - began
    print(as_text(rehearsal, advice, elapsed))
    figures = as_json(rehearsal, advice, elapsed)
    if settings.rehearsal.rehearse_json is not None:
        Path(settings.rehearsal.rehearse_json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if settings.rehearsal.rehearse_page is not None:
        Path(settings.rehearsal.rehearse_page).write_text(as_page(rehearsal, advice, elapsed), encoding="utf-8")
    return 0
