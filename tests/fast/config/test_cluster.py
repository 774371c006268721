"""Processes and devices, and who releases GPU memory for whom."""

import re

import pytest

from miles.config.cluster import Offload

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 2 --colocate "


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ('--train-env-vars {"A":1}', "environment variables are strings"),
        ('--train-env-vars {"A=B":"1"}', "a name is empty or has ="),
        ('--train-env-vars {"A":"\\u0000"}', "a zero byte, which no environment variable has"),
        ("--train-env-vars " + "[" * 50_000, "--train-env-vars .*: it is nested more than 100 levels deep"),
        ("--actor-num-nodes 0", r"must be in \[1, 100000\]"),
        (SGLANG + "--offload-rollout --no-offload-rollout", "--offload-rollout: contradicts --no-offload-rollout"),
        ("--ray-address ray://head:10001", "--ray-address ray://head:10001: is an address of Ray Client"),
        ("--ray-address head", "--ray-address head: is no address of a Ray cluster .* give HOST:PORT, or auto"),
        ("--ray-address local", "--ray-address local: starts a Ray that nothing would end"),
    ],
)
def test_refused_with_one_error(refused, flags, sentence):
    (message,) = refused(flags)
    assert re.search(sentence, message)


@pytest.mark.parametrize(
    ("flags", "on_gpus"),
    [
        (SGLANG, Offload(train=True, rollout=True)),
        (SGLANG + "--no-offload-train", Offload(train=False, rollout=True)),
        (SGLANG + "--no-offload-rollout", Offload(train=True, rollout=False)),
        (SGLANG + "--train-backend megatron", Offload(train=True, rollout=True)),
        ("--colocate", Offload(train=False, rollout=False)),
        ("--rollout-engine sglang", Offload(train=False, rollout=False)),
    ],
)
def test_both_sides_release_a_shared_gpu(validated, flags, on_gpus):
    settings = validated(flags).settings
    assert settings.offload("cuda") == on_gpus
    assert settings.offload("cpu") == Offload(train=False, rollout=False)


def test_device_that_turns_out_to_be_the_cpu(validated):
    """``--device auto`` is resolved when the run starts."""
    settings = validated(SGLANG + "--offload-rollout").settings
    with pytest.raises(ValueError, match="--offload-rollout: frees GPU memory, and this run is on CPU"):
        settings.offload("cpu")
