"""Fixtures that run ``python train.py`` as a user does."""

import pytest

from tests.fast.run.runs.launches import Launch, importing_from, prepare_workplace, small_run


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """Return a folder with prompts.jsonl and reward functions that a run can import."""
    return prepare_workplace(tmp_path_factory.mktemp("launches"))


@pytest.fixture(scope="session")
def launch(workplace, tiny_model):
    """Return ``launch(name, *flags, **environment)``: start a run of 4 prompts x 4 samples; it is killed at the end."""
    started = []

    def start(name, *flags, reward="spread", ranks=1, **environment):
        usual = small_run(workplace, tiny_model, reward, ranks)
        if "--bf16" in flags:
            usual.remove("--fp32")
        words = [*usual, *flags]
        started.append(Launch(workplace / name, words, PYTHONPATH=importing_from(workplace), **environment))
        return started[-1]

    yield start
    for run in started:
        run.kill()
