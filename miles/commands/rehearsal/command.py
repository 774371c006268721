"""The command: ``--rehearse``, ``miles rehearse``, and what run/launcher.py rehearses alongside a run."""

import json
import logging
import pickle
import sys
import time
from pathlib import Path

from miles.base.host import GIB
from miles.commands.rehearsal.rehearsal import advise, foresee_trainer, rehearse_settings
from miles.commands.rehearsal.report import as_json, as_page, as_text
from miles.commands.rehearsal.trace import Tracers
from miles.config.validate import Validated


def rehearse(validated: Validated) -> int:
    """Print the predicted needs of the run of ``validated`` settings, and write the files that were asked for.

    Returns:
        0; 1 if a file cannot be written, and 2 if the model or a flag cannot be rehearsed, with the reason on stderr.
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
    flags = settings.rehearsal
    if flags.rehearse_json is not None:
        figures = as_json(rehearsal, advice, elapsed)
        if not _is_written(flags.rehearse_json, json.dumps(figures, indent=2) + "\n"):
            return 1
    if flags.rehearse_page is not None and not _is_written(flags.rehearse_page, as_page(rehearsal, advice, elapsed)):
        return 1
    return 0


def _is_written(path: str, text: str) -> bool:
    """Write a file. If that fails, say why on stderr and return false."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"miles: error: {path}: cannot be written ({error.strerror}); give another path", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Trace the run of the settings on stdin, and write what its fullest rank allocates, in GiB, as JSON."""
    settings = pickle.load(sys.stdin.buffer)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    result: dict[str, float | str]
    try:
        result = {"gib": foresee_trainer(settings) / GIB}
    except Exception as error:  # the launcher notes it, and the run continues
        result = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
