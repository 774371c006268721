"""Routing replay needs a model with experts, an engine that returns them, and a trainer that can be given them."""

import json
import re

import pytest

from miles.engine.servers.keys import NO_KEYS
from miles.engine.sglang.engine import server_program
from miles.models.packing import WITH_KNOWN_ROUTERS

BOTH = ("--use-rollout-routing-replay", "--use-routing-replay")


@pytest.fixture
def model_of(tmp_path):
    def model(kind):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_experts": 4}))
        return f"--hf-checkpoint {tmp_path}"

    return model


@pytest.mark.parametrize("flag", BOTH)
@pytest.mark.parametrize("kind", [*WITH_KNOWN_ROUTERS, "kimi_k2"])
def test_families_with_known_routers(validated, model_of, kind, flag):
    assert validated(f"{model_of(kind)} {flag}", "--hf-checkpoint")


@pytest.mark.parametrize("flag", BOTH)
def test_other_models_are_refused(refused, model_of, flag):
    (message,) = refused(f"{model_of('llama')} {flag}", "--hf-checkpoint")
    assert re.match(f"{flag}: qwen3_moe, .* have routers that can be given experts, and this model is llama; ", message)


def test_servers_say_which_experts_they_chose_on_gpus(refused, validated, model_of):
    flags = f"{model_of('qwen3_moe')} --rollout-engine sglang"
    (message,) = refused(f"{flags} --use-rollout-routing-replay --device cpu", "--hf-checkpoint")
    assert message.startswith(
        "--use-rollout-routing-replay: --rollout-engine sglang reports which experts it chose on GPUs"
    )
    assert "use --rollout-engine torch, or replay the trainer's own with --use-routing-replay" in message
    assert validated(
        f"{flags} --use-routing-replay --device cpu", "--hf-checkpoint"
    ).settings.training.use_routing_replay
    settings = validated(f"{flags} --use-rollout-routing-replay --device cuda", "--hf-checkpoint").settings
    assert "--enable-return-routed-experts" in server_program(settings, "cuda", 0, NO_KEYS).arguments("h", 1)
    without = validated(f"{flags} --device cuda", "--hf-checkpoint").settings
    assert "--enable-return-routed-experts" not in server_program(without, "cuda", 0, NO_KEYS).arguments("h", 1)


@pytest.mark.parametrize("flag", BOTH)
def test_what_chooses_by_itself_is_refused(refused, model_of, flag):
    megatron = f"{model_of('qwen3_moe')} --train-backend megatron {flag}"
    messages = refused(f"{megatron} --mtp-num-layers 1 --enable-mtp-training", "--hf-checkpoint")
    assert any(m.startswith(f"{flag}: cannot be obeyed with --mtp-num-layers") for m in messages)
    messages = refused(f"{model_of('qwen3_moe')} {flag} --loss-type sft_loss", "--hf-checkpoint --rm-type")
    assert any(m.startswith(f"{flag}: has nothing to repeat") for m in messages)
