"""An engine of SGLang divides the model's attention heads over its devices, as SGLang asserts on GPUs."""

import json

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config.parser import judge
from tests.fast.config.conftest import minimal
from tests.fast.support.rows import rows

CONFIG = {"model_type": "qwen3", "num_attention_heads": 32}
ATTENTION = "--sglang-enable-dp-attention --sglang-dp-size"


@pytest.fixture
def judged(tmp_path):
    def read(size, flags="", device="cuda", config=CONFIG):
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = (
            f"--hf-checkpoint {tmp_path} --rollout-engine sglang --device {device} --rollout-num-gpus-per-engine "
            f"{size} --actor-num-gpus-per-node 1 {flags}"
        )
        return judge(read_command(minimal(words, without="--hf-checkpoint")))

    return read


@pytest.mark.parametrize(
    ("size", "flags", "fault"), rows(__file__, "test_an_engine_that_does_not_divide_the_heads_is_refused")
)
def test_an_engine_that_does_not_divide_the_heads_is_refused(judged, size, flags, fault):
    with pytest.raises(FlagError) as caught:
        judged(size, flags)
    (message,) = caught.value.messages
    assert message.startswith(f"--rollout-num-gpus-per-engine {size}: ") and fault in message
    with pytest.raises(FlagError):
        judged(size, flags, config={"model_type": "qwen3_vl", "text_config": CONFIG})


@pytest.mark.parametrize(("size", "flags"), [(4, ""), (6, f"{ATTENTION} 3"), (1, "")])
def test_an_engine_that_divides_the_heads_is_accepted(judged, size, flags):
    assert judged(size, flags)


def test_sglang_pads_the_heads_on_cpu(judged):
    assert judged(3, device="cpu")
