"""One rank has no gradients to reduce, which relies on how torch allocates them."""

import pytest
import torch

from miles.training.fsdp.models import NothingToReduce

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
