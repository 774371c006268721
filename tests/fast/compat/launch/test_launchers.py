"""Flags of public launch scripts that are obeyed under another name, or refused because they contradict the model."""

import json

import pytest

from miles.config.notes import SAME
from tests.fast.config.conftest import QWEN3

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
LATENT = QWEN3 | dict(
    model_type="deepseek_v3",
    num_hidden_layers=2,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.0,
    norm_topk_prob=True,
)


@pytest.fixture
def model(tmp_path):
    def write(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return f"--hf-checkpoint {tmp_path}"

    return write


def test_a_reward_function_sees_whole_groups_anyway(accepted):
    (note,) = [note for note in accepted("--group-rm").accepted if note.written == "--group-rm"]
    assert note.heading == SAME and "all samples of a group at once" in note.why


def test_files_of_samples_are_told_apart(accepted):
    rollout = accepted("--save-debug-rollout-data out/data.pt").settings.rollout
    assert rollout.save_debug_rollout_data == "out/data_{iteration}.pt"
    one = accepted("--save-debug-rollout-data out/data.pt --num-rollout 1").settings.rollout
    assert one.save_debug_rollout_data == "out/data.pt", "one iteration has one file"


def test_a_checkpoint_by_its_number(accepted, refusals, tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    assert accepted(f"--load {tmp_path} --ckpt-step 4").settings.checkpoint.load == str(tmp_path / "iter_0000004")
    [message] = refusals(f"--load {tmp_path} --ckpt-step 5")
    assert message.startswith("--ckpt-step 5: there is no folder")
    assert refusals(f"--load {tmp_path} --ckpt-step last")[0].startswith("--ckpt-step last: ")


def test_switches_of_an_earlier_sglang_have_their_effect(accepted):
    engine = "--rollout-engine sglang --actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 4"
    words = accepted(f"{engine} --sglang-enable-ep-moe --sglang-enable-deepep-moe").settings.server_flags.server
    assert words[-4:] == ("--ep-size", "4", "--moe-a2a-backend", "deepep")


def test_the_routers_flags_keep_the_name_that_was_written(refusals):
    [message] = refusals(
        "--rollout-engine sglang --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --sglang-router-port 3"
    )
    assert message.startswith("--sglang-router-port: the launcher sets it") and message.endswith("--sglang-router-port")


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_scaled_rotary_embedding_is_that_of_the_model(accepted, refusals, model, backend):
    flags = f"--train-backend {backend} --use-rope-scaling --rope-scaling-factor 8.0 --rotary-scaling-factor 8.0"
    assert accepted(f"{model(**QWEN3, rope_scaling=LLAMA3)} {flags}")
    messages = refusals(f"{model(**QWEN3)} {flags}")
    assert [message.split(":")[0] for message in messages] == ["--use-rope-scaling", "--rope-scaling-factor 8.0"]


def test_latent_attention_has_no_bias_and_scales_only_if_the_model_does(accepted, refusals, model):
    base = f"{model(**LATENT)} --train-backend megatron --multi-latent-attention"
    noted = accepted(f"{base} --add-qkv-bias --mscale 1.0 --mscale-all-dim 1.0 --rotary-scaling-factor 1")
    assert {"--add-qkv-bias", "--mscale-all-dim 1.0"} <= {note.written for note in noted.accepted}
    assert refusals(f"{base} --mscale-all-dim 1.0 --rotary-scaling-factor 40")


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_quantized_weights_are_refused(refusals, model, backend):
    quantized = model(**QWEN3, quantization_config={"quant_method": "fp8"})
    [message] = refusals(f"{quantized} --train-backend {backend}")
    assert "quantized weights are not trained; give a folder with its weights in bf16" in message


def test_what_fsdp_would_refuse_as_well_is_not_sent_there(refusals, model):
    unknown = {**QWEN3, "model_type": "minimax_m2"}
    windowed = {**unknown, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    for config, leads_there in (
        (unknown, True),
        (windowed, False),
        ({**unknown, "quantization_config": {"a": 1}}, False),
    ):
        [message] = refusals(f"{model(**config)} --train-backend megatron --megatron-to-hf-mode bridge")
        assert ("give --train-backend fsdp" in message) is leads_there, "one message, with a way that can be taken"


def test_heads_of_multi_token_prediction_belong_to_megatron(refusals):
    [message] = refusals("--train-backend fsdp --tensor-model-parallel-size 2 --mtp-num-layers 1 --enable-mtp-training")
    assert message.startswith("--enable-mtp-training: asks for a loss of the model's layers")


def test_functions_between_run_and_engines_are_refused(refusals):
    [message] = refusals("--slime-router-middleware-paths a.RadixTreeMiddleware mine.Filter")
    assert "functions between the run and its engines are not called" in message


@pytest.mark.parametrize(
    "flags",
    ["--lora-target-preset moe", "--lora-learning-rate 1e-4", "--lora-weight-decay 0", "--lora-load a"],
)
def test_flags_of_another_adapter_say_what_to_give(refusals, flags):
    [message] = refusals(flags)
    assert message.startswith(flags)
