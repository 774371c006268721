"""Trace a run alongside it, in a separate process: the part of ``run/launcher.py`` that computes."""

import json
import logging
import os
import pickle
import sys

from miles.base.host import GIB
from miles.config.settings import Settings


def main() -> None:
    """Trace the run of the settings on stdin, and write what its fullest rank allocates, in GiB, as JSON."""
    settings: Settings = pickle.load(sys.stdin.buffer)
    os.nice(10)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    from miles.commands.rehearsal.rehearsal import foresee_trainer

    result: dict[str, float | str]
    try:
        result = {"gib": foresee_trainer(settings) / GIB}
    except Exception as error:  # the launcher notes it, and the run continues
        result = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
