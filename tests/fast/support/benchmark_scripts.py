"""Import a script of benchmarks/, which imports others by their names."""

import importlib
import sys
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parents[3] / "benchmarks"


def benchmark(name):
    """Return the module of the script ``name``."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return importlib.import_module(name)
