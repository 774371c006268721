"""Write a line to the file $ANNOUNCED whenever a phase of a launcher's loop begins. Every Python process imports this.

A line is the name of the phase: load, generate, train, sync_weights, eval or save. Launchers are the children of the
process $HOLDER, also after a restart, when the launcher becomes another program.
"""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def announce(phase):
    with Path(os.environ["ANNOUNCED"]).open("a") as file:
        file.write(phase + "\n")


def announce_phases(module):
    """Announce each phase that is timed."""

    class AnnouncedTimer(module.PhaseTimer):
        def phase(self, name):
            announce(name)
            return super().phase(name)

    module.PhaseTimer = AnnouncedTimer


def announce_loads(module):
    """Announce that a checkpoint is looked for and loaded."""

    class AnnouncedLoop(module.TrainingLoop):
        def resume(self):
            announce("load")
            return super().resume()

    module.TrainingLoop = AnnouncedLoop


CHANGES = {"miles.observe.console": announce_phases, "miles.run.loop": announce_loads}


class Changer(PathFinder):
    """Imports the modules in ``CHANGES`` and changes them."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = super().find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change
        return spec


if os.getppid() == int(os.environ.get("HOLDER", 0)):
    sys.meta_path.insert(0, Changer)
