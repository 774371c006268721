"""The losses that layers of a Megatron model add to the objective are in the formula and the words of --explain."""

import pytest

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate

COMMON = "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 4"
COMMON += " --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8"
ROUTERS = "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("--enable-mtp-training --mtp-num-layers 1", ["pg_loss + 0.2 mtp_loss", "1 head that predicts later tokens"]),
        (
            f"{ROUTERS} --moe-router-load-balancing-type seq_aux_loss --use-kl-loss --kl-loss-coef 0.1",
            ["KL_k1(policy, reference) + 0.01 aux_loss + 0.001 z_loss", "w = each sample", "megatron/moe.py"],
        ),
        (ROUTERS, ["w = each micro-batch", "z_loss = "]),
        ("", []),
    ],
)
def test_losses_of_the_layers_are_shown(flags, shown):
    text = explain(validate(parse(f"{COMMON} --train-backend megatron {flags}".split())))
    assert all(each in " ".join(text.split()) for each in shown), text
    assert bool(shown) == ("The model adds" in text)
