"""The operations that an attempt of a run does at the same time."""

from types import SimpleNamespace

import pytest

from miles.config.cluster import ClusterArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.run.launcher import builds_while_engines_start
from miles.run.train_actor import TrainDriver


@pytest.mark.parametrize(
    ("length", "device", "colocate", "expected"),
    [
        ({"num_rollout": 3}, "cpu", True, True),
        ({"num_rollout": 3}, "cuda", False, True),
        ({"num_rollout": 3}, "cuda", True, False),  # an engine divides the memory that it finds
        ({"num_epoch": 3}, "cpu", True, False),  # the number of steps is not known yet
    ],
)
def test_the_trainer_builds_beside_the_engines_unless_they_share_gpus(length, device, colocate, expected):
    settings = Settings(rollout=RolloutArguments(**length), cluster=ClusterArguments(colocate=colocate))
    assert builds_while_engines_start(settings, device) is expected


@pytest.mark.parametrize("ahead", [False, True])
def test_models_are_built_once_whether_or_not_that_began_ahead(ahead):
    calls, waited = [], []
    driver = object.__new__(TrainDriver)
    driver._building = []

    def rank(number):
        def connect(address, steps):
            calls.append((number, address, steps))
            return f"rank {number}"

        return SimpleNamespace(
            serve_store=SimpleNamespace(remote=lambda: "address"), connect=SimpleNamespace(remote=connect)
        )

    driver.actors = [rank(0), rank(1)]
    driver._workers = SimpleNamespace(results=waited.extend)
    if ahead:
        driver.start_building(7)
        assert len(calls) == 2 and not waited, "it does not wait"
    driver.build(7)
    assert calls == [(0, "address", 7), (1, "address", 7)] and waited == ["rank 0", "rank 1"]
