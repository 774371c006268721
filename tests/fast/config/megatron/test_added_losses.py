"""The losses that layers of a Megatron model add to the objective are in the formula and the words of --explain."""

import pytest

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from tests.fast.support.rows import rows

COMMON = "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 4"
COMMON += " --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8"
ROUTERS = "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"


@pytest.mark.parametrize(("flags", "expected"), rows(__file__, "test_losses_of_the_layers_are_shown"))
def test_losses_of_the_layers_are_shown(flags, expected):
    text = explain(validate(parse(f"{COMMON} --train-backend megatron {flags}".split())))
    assert all(each in " ".join(text.split()) for each in expected), text
    assert bool(expected) == ("The model adds" in text)
