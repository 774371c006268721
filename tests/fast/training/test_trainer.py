"""A trainer's timed phases, and its scores."""

from types import SimpleNamespace

import numpy as np
import pytest

from miles.objective.adaptive import Coefficients
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.training.scoring import needs_of, score, with_engine_log_probs
from miles.training.trainer import Trainer
from miles.types.train_batch import TrainBatch, TrainShard


@pytest.mark.parametrize(("selects", "ranks"), [(False, False), (True, False), (False, True), (True, True)])
def test_scoring_for_the_choice_of_tokens_is_timed(monkeypatch, selects, ranks):
    clock = iter(range(100))
    monkeypatch.setattr("miles.training.trainer.time.perf_counter", lambda: next(clock))

    class Selector:
        def select(self, backend, shard, step):
            next(clock)
            return [*shard, "selected"]

        def rank_entropies(self, backend, shard):
            next(clock)
            return [*shard, "top_entropy"]

    trainer = object.__new__(Trainer)
    trainer.backend, trainer.selector = None, Selector()
    trainer.objective = SimpleNamespace(estimates_by_token=False, selects_tokens=selects, ranks_entropies=ranks)
    trainer.critic = None
    trainer.passes, trainer.loss = 1, LossArguments()
    trainer.coefficients = Coefficients(LossArguments())
    trainer.recorder = SimpleNamespace(begin=lambda step, shard: None)
    monkeypatch.setattr(Trainer, "_policy_step", lambda self, policy, shard: {"columns": shard})
    monkeypatch.setattr("miles.training.trainer.score", lambda backend, shard, needs: shard)
    monkeypatch.setattr("miles.training.trainer.needs_of", lambda *arguments: None)
    trainer.policy = None
    [metrics] = trainer.train([[]])
    assert metrics["columns"] == ["selected"] * selects + ["top_entropy"] * ranks
    if selects or ranks:
        assert metrics["time/token_selection"].value == 1 + selects + ranks
    else:
        assert "time/token_selection" not in metrics


def test_the_engines_log_probs_are_old_ones_without_a_pass():
    """Later steps need old log-probs; a backend that could score would be asked for ``policy``, and there is none."""
    engine = [np.array([-0.5, -1.0], np.float32)]
    shard = TrainShard(make_batch(engine), micro_batches=[])
    needs = needs_of(build_objective(LossArguments(use_rollout_logprobs=True)), step=1, trains_policy=True, passes=2)
    assert needs.old_log_probs
    scored = score(None, with_engine_log_probs(shard), needs)
    assert scored.batch.old_log_probs is engine
    with pytest.raises(AttributeError, match="policy"):
        score(None, shard, needs)


def make_batch(engine: list[np.ndarray]) -> TrainBatch:
    ones = [np.ones(len(column), np.float32) for column in engine]
    return TrainBatch(
        tokens=[np.arange(len(column) + 1) for column in engine],
        response_lengths=[len(column) for column in engine],
        loss_masks=ones,
        rollout_log_probs=engine,
        rewards=[1.0] * len(engine),
        sample_denoms=[1.0] * len(engine),
        trajectory_token_counts=[1.0] * len(engine),
        group_indices=[0] * len(engine),
        trajectory_ids=list(range(len(engine))),
        position_in_step=list(range(len(engine))),
        num_trajectories=len(engine),
        num_loss_tokens=sum(map(len, engine)),
        expected_loss_mass=1.0,
    )
