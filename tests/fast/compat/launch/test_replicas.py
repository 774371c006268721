"""Replicas of SGLang, `--sglang-dp-size`, are engines of their own behind the router."""

import pytest

from miles.config.explain import explain

SGLANG = "--rollout-engine sglang "


@pytest.mark.parametrize(
    ("flags", "devices", "engines"),
    [
        ("--sglang-dp-size 2", 2, 2),
        ("--sglang-dp 3", 3, 3),
        ("--sglang-data-parallel-size=2 --rollout-num-gpus-per-engine 4", 8, 2),
        ("--sglang-dp-size 2 --rollout-num-gpus-per-engine 2 --rollout-num-gpus 8", 8, 4),
        ("--sglang-dp-size 2 --colocate", None, 2),
    ],
)
def test_replicas_are_engines(accepted, flags, devices, engines):
    result = accepted(SGLANG + flags)
    assert "--dp-size" not in result.settings.server_flags.server
    assert (result.settings.cluster.rollout_num_gpus, result.settings.num_engines) == (devices, engines)
    (note,) = [note for note in result.accepted if "-d" in note.written and note.heading == "read as"]
    assert f"{engines} engines of" in note.why and not note.is_refused_if_strict
    assert f"{engines} SGLang engines" in " ".join(explain(result).split())


def test_attention_data_parallelism_stays_in_an_engine(accepted):
    flags = "--sglang-dp-size 2 --sglang-enable-dp-attention --rollout-num-gpus-per-engine 2"
    result = accepted(SGLANG + flags).settings
    assert result.server_flags.server[-3:] == ("--dp-size", "2", "--enable-dp-attention") and result.num_engines == 1


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--sglang-dp-size 2 --rollout-num-gpus 3", "need 2 devices or a multiple; give --rollout-num-gpus 2"),
        ("--sglang-dp-size 4 --colocate", "need 4 devices or a multiple"),
    ],
)
def test_replicas_without_devices_are_refused(refusals, flags, needed):
    (message,) = refusals(SGLANG + flags)
    assert message.startswith("--sglang-dp-size") and needed in message and "--sglang-enable-dp-attention" in message
