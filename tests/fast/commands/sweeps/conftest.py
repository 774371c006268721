"""Start ``miles sweep`` as a user does, with the runs of tests/fast/run/runs."""

import json
import sys

import pytest

from tests.fast.run.runs.launches import Launch, importing_from, prepare_workplace, small_run

PROGRAM = [sys.executable, "-m", "miles", "sweep"]


class SweepLaunch(Launch):
    """A sweep in its own session; its runs inherit the mark that identifies its processes."""

    def __init__(self, file, words, **environment):
        self.start([*PROGRAM, file, *words], environment)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """Return a folder with prompts.jsonl and reward functions that a run can import."""
    return prepare_workplace(tmp_path_factory.mktemp("sweeps"))


@pytest.fixture
def sweep(workplace, tiny_model, tmp_path):
    """Return ``sweep(definition, *words, **environment)``: start a sweep of small runs; it is killed at the end."""
    started = []

    def start(definition, *words, **environment):
        file = tmp_path / "sweep.yaml"
        flags = " ".join(map(str, small_run(workplace, tiny_model)))
        file.write_text(json.dumps({"flags": flags, **definition}))
        out = ("--out", tmp_path / "out")
        started.append(SweepLaunch(file, [*out, *words], PYTHONPATH=importing_from(workplace), **environment))
        return started[-1]

    yield start
    for run in started:
        run.kill()
