"""What a trainer times."""

from types import SimpleNamespace

import pytest

from miles.objective.coefficients import Coefficients
from miles.objective.settings import LossArguments
from miles.training.trainer import Trainer


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
    trainer.objective = SimpleNamespace(selects_tokens=selects, ranks_entropies=ranks)
    trainer.estimator = trainer.critic = None
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
