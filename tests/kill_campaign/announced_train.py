"""Run ``train.py`` and write a line to the file $ANNOUNCED whenever a phase of the loop begins.

A line has the phase (load, generate, train, sync_weights, eval, save) and its number: 1 for the first of this kind.
"""

import os
import sys
from collections import Counter
from pathlib import Path

from miles import loop
from miles.cli import main
from miles.tracking import phase_timer

starts = Counter()


def announce(phase):
    starts[phase] += 1
    with Path(os.environ["ANNOUNCED"]).open("a") as file:
        file.write(f"{phase} {starts[phase]}\n")


class AnnouncedTimer(phase_timer.PhaseTimer):
    """Announces each phase that it times."""

    def phase(self, name):
        announce(name)
        return super().phase(name)


class AnnouncedLoop(loop.TrainingLoop):
    """Announces that a checkpoint is looked for and loaded."""

    def resume(self):
        announce("load")
        return super().resume()


phase_timer.PhaseTimer = AnnouncedTimer
loop.TrainingLoop = AnnouncedLoop

if __name__ == "__main__":
    sys.argv[0] = "train.py"
    sys.exit(main(["train", *sys.argv[1:]]))
