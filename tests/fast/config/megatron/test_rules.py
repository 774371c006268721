"""Flags of --train-backend megatron: its own dataclasses' fields, the model's shape, and refused values."""

import json

import pytest

from miles.base.flags import FlagError
from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate
from tests.fast.config.conftest import QWEN3

LLAMA = QWEN3 | dict(
    model_type="llama",
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
EXPERTS = LLAMA | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SIGMOID = dict(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
)
LATENT = (
    LLAMA
    | SIGMOID
    | dict(
        model_type="kimi_k2",
        tie_word_embeddings=False,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        rope_parameters=None,
        rope_scaling=dict(type="yarn", factor=4, original_max_position_embeddings=32, mscale=1, mscale_all_dim=1),
        auto_map={"AutoConfig": "code.Config"},
    )
)
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
SIX = dict(num_hidden_layers=6)
PIPELINE3 = "--actor-num-gpus-per-node 6 --pipeline-model-parallel-size 3"
INTERLEAVED = f"{PIPELINE3} --num-layers-per-virtual-pipeline-stage 1"
RANKS4 = "--actor-num-gpus-per-node 4 "


@pytest.fixture
def megatron(tmp_path, command):
    """Validated settings of a run on four ranks of the backend; ``config`` is the model's."""

    def run(flags: str, config: dict | None = None) -> Settings:
        (tmp_path / "config.json").write_text(json.dumps(config or LLAMA))
        words = command(RANKS4 + "--train-backend megatron " + flags, without="--hf-checkpoint")
        return validate(parse([*words, "--hf-checkpoint", str(tmp_path)])).settings

    return run


def test_launch_scripts_may_say_the_models_shape(megatron):
    settings = megatron(
        "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 "
        "--rotary-base 10000 --vocab-size 64 --use-rotary-position-embeddings --no-position-embedding "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32 "
        "--accumulate-allreduce-grads-in-fp32 --no-rope-fusion --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel"
    )
    assert dict(settings.megatron_overrides)["recompute_granularity"] == "full"
    dims = settings.dims
    assert dims.token_ranks == 2 and [dims.token_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_launch_scripts_of_latent_models(megatron):
    """The flags of public scripts for DeepSeek-V3 and Kimi-K2, at another size."""
    settings = megatron(
        "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
        "--v-head-dim 6 --kv-channels 8 --qk-layernorm --rope-type yarn --rotary-scaling-factor 4 --mscale 1.0 "
        "--mscale-all-dim 1.0 --num-experts 8 --moe-layer-freq [0]*1+[1]*3 --moe-ffn-hidden-size 16 "
        "--moe-router-topk 2 --moe-shared-expert-intermediate-size 16 --moe-router-pre-softmax "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
        "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-dtype fp32 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --untie-embeddings-and-output-weights",
        LATENT,
    )
    assert dict(settings.megatron_overrides)["kv_lora_rank"] == 16


def test_pipeline_stages_repeat_the_shards(megatron):
    settings = megatron("--pipeline-model-parallel-size 2")
    dims = settings.dims
    assert dims.token_ranks == 2 and [dims.token_rank(rank) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("flags", "config", "told"),
    [
        ("--num-layers 6", LLAMA, ["--num-layers 6", "config.json gives --num-layers 4"]),
        ("--untie-embeddings-and-output-weights", LLAMA, ["--untie-embeddings", "config.json states the opposite"]),
        ("--norm-epsilon 1e-6", LLAMA, ["--norm-epsilon 1e-06", "1e-05"]),
        ("--qk-layernorm", LLAMA, ["--qk-layernorm", "config.json states the opposite"]),
        ("--attention-backend flash", LLAMA, ["--attention-backend flash", "miles' own"]),
        ("--moe-aux-loss-coeff 0.1", LLAMA, ["--moe-aux-loss-coeff 0.1", "a model without experts"]),
        ("--moe-z-loss-coeff 0.1", LLAMA, ["--moe-z-loss-coeff 0.1", "without experts"]),
        ("--moe-aux-loss-coeff -1", EXPERTS, ["--moe-aux-loss-coeff -1", "0 or more"]),
        (
            "--moe-aux-loss-coeff 0.1 --advantage-estimator ppo",
            EXPERTS,
            ["--advantage-estimator ppo", "whose experts would be balanced by no loss"],
        ),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            EXPERTS,
            ["--moe-aux-loss-coeff 0.1", "--moe-router-load-balancing-type none"],
        ),
        (
            "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
            EXPERTS,
            ["--moe-router-load-balancing-type global_aux_loss", "seq_aux_loss"],
        ),
        ("--recompute-method uniform", LLAMA, ["--recompute-method uniform", "--recompute-granularity full"]),
        ("--recompute-num-layers 1", LLAMA, ["--recompute-num-layers 1", "--recompute-granularity full"]),
        ("--enable-mtp-training", LLAMA, ["--mtp-num-layers", "required"]),
        (
            "--enable-mtp-training --mtp-num-layers 2",
            LLAMA | {"num_nextn_predict_layers": 1},
            ["--mtp-num-layers 2", "num_nextn_predict_layers 1"],
        ),
        (
            "--enable-mtp-training --mtp-num-layers 1 --pipeline-model-parallel-size 2",
            LLAMA,
            ["--mtp-num-layers 1", "tied embedding", "--pipeline-model-parallel-size 1"],
        ),
        ("--recompute-granularity selective", LLAMA, ["--recompute-granularity selective", "whole layers"]),
        ("--fp8-format e4m3", LLAMA, ["--fp8-format e4m3", "8 or 4 bits"]),
        ("--overlap-param-gather", LLAMA, ["--overlap-param-gather", "not been tested"]),
        ("--virtual-pipeline-model-parallel-size 2", LLAMA, ["--virtual-pipeline-model-parallel-size 2"]),
        ("--tensor-model-parallel-size 3", LLAMA | THREE_HEADS, ["--tensor-model-parallel-size 3", "4 trainer ranks"]),
        ("--tensor-model-parallel-size 4", LLAMA, ["--tensor-model-parallel-size 4", "2 key and value heads"]),
        ("--pipeline-model-parallel-size 4", LLAMA | {"num_hidden_layers": 6}, ["--pipeline", "6 layers"]),
        (f"{PIPELINE3} --num-layers-per-virtual-pipeline-stage 4", LLAMA | SIX, ["multiple of it", "a divisor of 2"]),
        (
            f"{PIPELINE3} --num-layers-per-virtual-pipeline-stage 1 --decoder-last-pipeline-num-layers 2",
            LLAMA | SIX,
            ["--num-layers-per-virtual-pipeline-stage 1", "the layers of the first or the last stage"],
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            LLAMA,
            ["--num-layers-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-size 3 or more"],
        ),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 1.5", LLAMA, ["--optimizer-offload-fraction 1.5"]),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0", LLAMA, ["--optimizer-offload-fraction 0.0"]),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --fp32",
            LLAMA,
            ["--optimizer-offload-fraction 0.5", "with --fp32"],
        ),
        (
            "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --lora-rank 8",
            LLAMA,
            ["--optimizer-offload-fraction 0.5", "with --lora-rank"],
        ),
        ("--lora-rank 8", LATENT, ["--lora-rank 8", "latent attention of a kimi_k2", "--train-backend fsdp"]),
        ("--tensor-model-parallel-size 2", EXPERTS, ["--tensor-model-parallel-size 2", "--sequence-parallel"]),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            EXPERTS,
            ["--expert-tensor-parallel-size 1", "wrong gradients"],
        ),
        ("--v-head-dim 8", LATENT, ["--v-head-dim 8", "config.json gives --v-head-dim 6"]),
        ("--moe-router-bias-update-rate 1e-3", LATENT, ["--moe-router-bias-update-rate 0.001", "of the checkpoint"]),
        ("--moe-aux-loss-coeff 0.1", LATENT, ["--moe-aux-loss-coeff 0.1", "not tested for a kimi_k2"]),
        ("--enable-mtp-training --mtp-num-layers 1", LATENT, ["--mtp-num-layers 1", "heads of a kimi_k2"]),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
            LATENT | {"n_shared_experts": 1, "moe_intermediate_size": 15},
            ["--tensor-model-parallel-size 2", "15 rows of the model's shared experts"],
        ),
        ("", LLAMA | {"model_type": "gemma"}, ["model_type gemma", "llama, qwen2"]),
        ("", LLAMA | {"model_type": "mistral"}, ["model_type mistral", "--megatron-to-hf-mode bridge"]),
        ("", LLAMA | {"attention_bias": True}, ["attention_bias", "no bias of a llama"]),
        ("--num-layerz 4", LLAMA, ["--num-layerz", "--num-layers"]),
    ],
)
def test_refused(megatron, flags, config, told):
    with pytest.raises(FlagError) as error:
        megatron(flags, config)
    (message,) = error.value.messages
    assert all(word in message for word in told), message


def test_all_sizes_that_do_not_fit_are_reported_at_once(megatron):
    """Those that do not divide the ranks, and those that do not divide the model."""
    with pytest.raises(FlagError) as error:
        megatron("--tensor-model-parallel-size 3 --pipeline-model-parallel-size 4", LLAMA | {"num_hidden_layers": 6})
    said = "\n".join(error.value.messages)
    assert all(part in said for part in ("4 trainer ranks", "2 key and value heads", "the model's 6 layers")), said


def test_reference_has_the_shape_of_the_policy(megatron, tmp_path):
    reference = tmp_path / "reference"
    reference.mkdir()
    flags = f"--use-kl-loss --ref-load {reference}"
    (reference / "config.json").write_text(json.dumps(LLAMA))
    assert megatron(flags).model.ref_load == str(reference)
    (reference / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 6}))
    with pytest.raises(ValueError, match=r"--ref-load .*num_layers 6.*--hf-checkpoint gives 4"):
        megatron(flags)


def test_other_backend_takes_none_of_these_flags(validated):
    fsdp = "--train-backend fsdp --actor-num-gpus-per-node 2"
    (note,) = validated(f"{fsdp} --tensor-model-parallel-size 2").accepted
    assert note.written == "--tensor-model-parallel-size 2"
    with pytest.raises(ValueError, match="--moe-z-loss-coeff 0.1: asks for a loss of the model's layers"):
        validated(f"{fsdp} --moe-z-loss-coeff 0.1")


@pytest.mark.parametrize(
    "flags",
    [
        "--use-kl-loss --kl-loss-coef 0.1 --ref-update-interval 2",
        "--use-routing-replay",
        "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
        "--lora-rank 8 --target-modules q_proj",
    ],
)
def test_an_interleaved_pipeline_runs_what_others_run(megatron, flags):
    assert megatron(f"{INTERLEAVED} {flags}", EXPERTS | SIX).megatron.chunks(6) == 2


def test_an_interleaved_pipeline_has_equal_parts(megatron):
    flags = f"{PIPELINE3} --num-layers-per-virtual-pipeline-stage"
    assert megatron(f"{flags} 1", LLAMA | SIX).megatron.chunks(6) == 2
    assert megatron(f"{flags} 2", LLAMA | SIX | {"num_hidden_layers": 12}).megatron.chunks(12) == 2
    assert (
        megatron("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2").megatron.chunks(4) == 1
    )
    assert megatron("").megatron.chunks(4) == 1


def test_an_optimizer_in_host_memory_is_divided(megatron):
    assert megatron("--optimizer-cpu-offload").megatron.divides_optimizer
    assert not megatron("").megatron.divides_optimizer
