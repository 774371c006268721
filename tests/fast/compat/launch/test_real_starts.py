"""Lines of the corpus run an iteration on a CPU, with a tiny model and with sizes that a laptop can do."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles.models.tiny import character_tokenizer, write_model
from tests.fast.compat.launch.launch_corpus import read_lines

REPO = Path(__file__).parents[4]
SHAPE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=4,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
ON_A_LAPTOP = "--device cpu --num-rollout 1"
ANSWERS = (
    "--rollout-engine torch --rollout-batch-size 2 --n-samples-per-prompt 2 --global-batch-size 4 "
    "--rollout-max-response-len 12 --rm-type length"
)
# The block of Qwen3-30B-A3B, with the sizes of the tiny model.
TINY_MOE = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 8 --num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --normalization RMSNorm "
    "--position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu "
    "--untie-embeddings-and-output-weights --moe-ffn-hidden-size 16 --moe-router-score-function softmax "
    "--moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-layer-freq [1]*4 --num-experts 4 "
    "--moe-grouped-gemm --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-aux-loss-coeff 0"
)


@dataclass(frozen=True)
class Start:
    """A line by its name, the flags that follow it, and the metrics that its iteration must have."""

    line: str
    flags: str
    metrics: tuple[str, ...]
    experts: bool = False


STARTS = [
    Start(
        "LoRA on FSDP",
        f"{ANSWERS} --actor-num-gpus-per-node 1 --target-modules q_proj,v_proj --lora-rank 2",
        ("train/pg_loss", "train/grad_norm", "rollout/reward"),
    ),
    Start(
        "MoE with expert parallelism",
        f"{ANSWERS} --actor-num-gpus-per-node 2 --tensor-model-parallel-size 1 --expert-model-parallel-size 2",
        ("train/pg_loss", "train/grad_norm", "rollout/reward"),
        experts=True,
    ),
    Start(
        "SFT on conversations",
        "--actor-num-gpus-per-node 2 --rollout-batch-size 4 --global-batch-size 4",
        ("train/loss", "train/grad_norm"),
    ),
    Start(
        "the engine's log-probs as the old ones",
        f"{ANSWERS} --rollout-num-gpus 1 --actor-num-gpus-per-node 1 --train-backend fsdp",
        ("train/pg_loss", "train/mismatch_kl", "train/train_rollout_logprob_abs_diff"),
    ),
]


def words_of(start: Start, folder: Path) -> list[str]:
    """Return the line, without its model's sizes, and without W&B, whose package is an extra."""
    changed = dict(QWEN3_4B="", QWEN3_30B=TINY_MOE, WANDB="")
    [line] = [line for line in read_lines(**changed) if line.name == start.line]
    tokenizer = character_tokenizer()
    shape = {**SHAPE, "vocab_size": len(tokenizer)}
    kind = {"model_type": "qwen3_moe", **EXPERTS} if start.experts else {"model_type": "qwen3"}
    write_model(kind | shape, folder / line.model)
    tokenizer.save_pretrained(folder / line.model)
    rows = [{"prompt": f"{n} + {n} =", "label": str(2 * n), "messages": conversation(n)} for n in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = ["--output-dir", str(folder / "run")]
    return [*line.words(folder), *ON_A_LAPTOP.split(), *start.flags.split(), *run]


def conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} + {number} ="}, {"role": "assistant", "content": str(2 * number)}]


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.line)
def test_it_runs_an_iteration(start, tmp_path):
    command = [sys.executable, "train.py", *words_of(start, tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    ended = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = {name for row in rows for name in row}
    assert not set(start.metrics) - metrics, sorted(metrics)
    assert any((tmp_path / "out" / "ckpt").iterdir()), "--save"
