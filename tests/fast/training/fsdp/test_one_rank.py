"""One rank has no gradients to reduce, which relies on how torch allocates them. Scoring has no dropout."""

import pytest
import torch
from torch import nn

from miles.training.fsdp.models import NothingToReduce
from miles.training.fsdp.runner import FsdpModel

CPU = torch.device("cpu")


def test_another_torch_is_named_if_it_allocates_in_another_way():
    nothing = NothingToReduce()
    gradient = nothing.allocate((4,), dtype=torch.float32, device=CPU)
    assert nothing.allocate((4,), dtype=torch.float32, device=CPU) is gradient, "the output is the input"
    nothing.allocate((4,), dtype=torch.float32, device=CPU)
    words = rf"torch {torch.__version__.replace('+', '.')} does not .*, as 2\.13 does .*; install torch 2\.13"
    with pytest.raises(AssertionError, match=words):
        nothing.allocate((8,), dtype=torch.float32, device=CPU)
    with pytest.raises(AssertionError, match="one rank has nothing to reduce"):
        nothing()


@pytest.mark.parametrize("trains", [True, False])
def test_dropout_is_off_in_a_scoring_pass_and_as_before_after_it(monkeypatch, trains):
    class Module(nn.Sequential):
        def scorer(self, micro):
            return self

    module = Module(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5))).train(trains)
    model = FsdpModel(module, None, CPU)
    monkeypatch.setattr(model, "_collated", lambda shard, plans: plans)
    scored = model.forward(None, [torch.ones(64, 4)] * 2, lambda micro, scorer: scorer(micro))
    assert torch.equal(*scored) and not scored[0].requires_grad
    assert [part.training for part in module.modules()] == [trains] * 4
