"""State that a trainer rank saves and restores alongside its backend, and when the reference follows the policy."""

import json
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from miles.config.checkpoint import CheckpointArguments
from miles.config.cluster import ClusterArguments
from miles.config.model import ModelArguments
from miles.config.settings import Settings
from miles.objective.adaptive import Coefficients
from miles.objective.settings import LossArguments
from miles.run.train_actor import TrainActor
from miles.types.metrics import Metric

LOSS = LossArguments(use_kl_loss=True, kl_loss_coef=0.1, kl_target=0.2, entropy_target=0.3)


class Backend:
    """Keeps the states that it is given, as JSON does."""

    def __init__(self, saved=None):
        self.saved = saved
        self.refreshed = 0

    def save(self, folder, state, staged=None):
        self.saved = json.dumps(state)

    def load(self, folder, optimizer=True, rng=True, reference=True):
        self.given = optimizer, rng, reference
        return json.loads(self.saved)

    def refresh_reference(self):
        self.refreshed += 1


def actor_of(backend, **checkpoint):
    """An actor without its process group: backend and trainer are set as ``connect`` would."""
    actor = object.__new__(TrainActor)
    actor.rank = 0
    actor.device = torch.device("cpu")
    actor.settings = Settings(checkpoint=CheckpointArguments(**checkpoint), loss=LOSS, model=ModelArguments())
    actor.backend = backend
    coefficients = Coefficients(LOSS)
    trainer = SimpleNamespace(coefficients=coefficients, restore_coefficients=coefficients.restore)
    trainer.train = lambda shards, trains_policy, iteration: [{"train/loss": Metric(1.0)}, {"train/loss": Metric(2.0)}]
    trainer.recorder = SimpleNamespace(read=dict)  # nothing is recorded
    actor.trainer = trainer
    return actor


def save_at_once(actor, folder, state):
    actor.save(folder, state)


def save_in_background(actor, folder, state):
    """As with ``--async-save``."""
    actor.stage(folder, state)
    actor.written()


@pytest.mark.parametrize("save", [save_at_once, save_in_background])
@pytest.mark.parametrize("finetune", [False, True])
def test_weights_that_adapt_are_restored_unless_only_the_weights_are_wanted(tmp_path, finetune, save):
    backend = Backend()
    saving = actor_of(backend)
    metrics = {"train/kl_loss": Metric(0.5), "train/entropy_loss": Metric(0.1)}
    saving.trainer.coefficients.follow(metrics, 100)
    save(saving, tmp_path, {"rollouts_done": 1})
    resumed = actor_of(backend, finetune=finetune)
    assert resumed.load(tmp_path)["rollouts_done"] == 1
    assert backend.given == (not finetune, not finetune, not finetune)
    expected = LOSS if finetune else replace(LOSS, kl_loss_coef=0.1 * (1 + 0.2 * 100 / 10000), entropy_coef=0.005)
    assert resumed.trainer.coefficients.loss == expected


def test_a_checkpoint_of_an_earlier_version_has_no_weights_that_adapt(tmp_path):
    resumed = actor_of(Backend(json.dumps({"rollouts_done": 3})))
    assert resumed.load(tmp_path)["rollouts_done"] == 3
    assert resumed.trainer.coefficients.loss == LOSS


def test_the_flag_bounds_collective_operations():
    actor = actor_of(Backend())
    actor.settings = replace(actor.settings, cluster=ClusterArguments(distributed_timeout_minutes=7))
    assert actor._timeout == timedelta(minutes=7)


@pytest.mark.parametrize("due", [False, True])
def test_the_reference_follows_after_the_last_step_of_an_iteration(due):
    actor = actor_of(Backend())
    interval = {False: 2, True: 1}[due]
    actor.settings = replace(actor.settings, model=replace(actor.settings.model, ref_update_interval=interval))
    steps = actor.train([], 0).steps
    assert actor.backend.refreshed == due
    assert ["time/ref_update" in step for step in steps] == [False, due]


def test_the_last_step_has_the_memory_of_the_rank():
    """256 MiB that are written to are held."""
    actor = actor_of(Backend())
    first = actor.train([], 0).steps
    held = bytearray(b"1") * 2**28
    second = actor.train([], 1).steps
    assert ["perf/trainer_memory_gib" in step for step in first] == [False, True]
    grown = second[-1]["perf/trainer_memory_gib"].value - first[-1]["perf/trainer_memory_gib"].value
    assert len(held) == 2**28 and grown == pytest.approx(0.25, abs=0.05)


def test_a_rank_shares_the_cores_with_the_engine_while_both_load(monkeypatch):
    """On four cores, a rank that has them to itself in a step loads with two threads."""
    monkeypatch.setattr("miles.config.host_share.busy_cores", lambda: 4)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **group: None)
    actor = actor_of(Backend())
    cluster = ClusterArguments(actor_num_gpus_per_node=1, colocate=True)
    actor.settings = replace(actor.settings, cluster=cluster)
    actor.store, before = None, torch.get_num_threads()
    loads_with = []
    actor.build = lambda total_steps: loads_with.append(torch.get_num_threads())
    try:
        actor.connect(("here", 0), 7)
        assert (loads_with, torch.get_num_threads()) == ([2], 4)
    finally:
        torch.set_num_threads(before)
