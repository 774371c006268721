"""Who gives up GPU memory for whom."""

import pytest

from miles.arguments.offload_rules import Offload, offload_on

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 2 --colocate "


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--offload-train", "--offload-train: would be ignored without --colocate; add that switch"),
        ("--colocate --no-offload-train", "would be ignored without SGLang servers of this run's own"),
        (SGLANG + "--offload-rollout --no-offload-rollout", "--offload-rollout: contradicts --no-offload-rollout"),
        (SGLANG + "--offload-train --train-backend megatron", "--train-backend megatron cannot in this version"),
        (SGLANG + "--offload-train --device cpu", "--offload-train: frees GPU memory, and this run is on CPU; drop"),
    ],
)
def test_offload_without_effect_is_refused(validated, flags, told):
    with pytest.raises(ValueError, match=told):
        validated(flags)


@pytest.mark.parametrize(
    ("flags", "on_gpus"),
    [
        (SGLANG, Offload(train=True, rollout=True)),
        (SGLANG + "--no-offload-train", Offload(train=False, rollout=True)),
        (SGLANG + "--no-offload-rollout", Offload(train=True, rollout=False)),
        (SGLANG + "--train-backend megatron", Offload(train=False, rollout=True)),
        ("--colocate", Offload(train=False, rollout=False)),
        ("--rollout-engine sglang", Offload(train=False, rollout=False)),
    ],
)
def test_what_shares_a_gpu_makes_room_for_the_other(validated, flags, on_gpus):
    settings = validated(flags).settings
    assert offload_on(settings, "cuda") == on_gpus
    assert offload_on(settings, "cpu") == Offload(train=False, rollout=False)


def test_device_that_turns_out_to_be_the_cpu(validated):
    """``--device auto`` is resolved when the run starts."""
    settings = validated(SGLANG + "--offload-rollout").settings
    with pytest.raises(ValueError, match="--offload-rollout: frees GPU memory, and this run is on CPU"):
        offload_on(settings, "cpu")
