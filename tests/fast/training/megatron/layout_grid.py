"""Every way to divide one, two or four ranks on either backend, and the validator's answer to each. Torch-free."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from miles.config.parser import parse
from miles.config.validate import validate

DYNAMIC_BUDGET = 10  # tokens per rank, under dynamic context parallelism
COMMAND = (
    "--prompt-data reasoning_gym:products --rm-type last_number --num-rollout 1 --rollout-batch-size 8 "
    "--n-samples-per-prompt 4 --rollout-max-response-len 8"
)
DENSE = dict(
    model_type="llama",
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    vocab_size=66,
    max_position_embeddings=2048,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
EXPERTS = DENSE | dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


@dataclass(frozen=True)
class Kind:
    """A column of the table: a model and its losses."""

    title: str
    config: str  # dense or experts
    flags: str = ""
    expert_parallel: int = 1
    cut_experts: bool = False  # also split experts over tensor parallelism; otherwise each is whole on one rank


MTP_FLAGS = "--mtp-num-layers 2 --enable-mtp-training"
ROUTER_FLAGS = "--moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.05"
KINDS = {
    "fsdp": (Kind("dense", "dense"), Kind("experts", "experts")),
    "megatron": (
        Kind("dense", "dense"),
        Kind("dense, MTP", "dense", MTP_FLAGS),
        Kind("experts, router losses", "experts", ROUTER_FLAGS),
        Kind("the same, EP 2", "experts", f"{ROUTER_FLAGS} --expert-model-parallel-size 2", 2),
        Kind("the same, EP 4", "experts", f"{ROUTER_FLAGS} --expert-model-parallel-size 4", 4),
        Kind(
            "the same, EP 2 and cut",
            "experts",
            f"{ROUTER_FLAGS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
            2,
            cut_experts=True,
        ),
    ),
}


@dataclass(frozen=True)
class Split:
    """A row of the table. ``cp`` 0 is dynamic context parallelism."""

    backend: str
    ranks: int
    cp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    padded: bool = False

    @property
    def name(self) -> str:
        """The row's title, ``4 ranks: TP 2 with SP, DP 2, padded``; the remaining ranks are replicas (DP)."""
        shared = self.tp * self.pp * max(self.cp, 1)
        parts = [f"TP {self.tp}" + " with SP" * self.sp] * (self.tp > 1) + [f"PP {self.pp}"] * (self.pp > 1)
        parts += ["dynamic CP"] if not self.cp else [f"CP {self.cp}"] * (self.cp > 1)
        parts += [f"DP {self.ranks // shared}"] * (self.cp > 0 and self.ranks > shared) + ["padded"] * self.padded
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + f": {', '.join(parts)}" * bool(parts)

    def flags(self, kind: Kind) -> str:
        """The flags for train.py, without the model."""
        words = [f"--train-backend {self.backend} --actor-num-gpus-per-node {self.ranks}"]
        if not self.cp:
            words.append(f"--dynamic-context-parallel --max-seqlen-per-dp-cp-rank {DYNAMIC_BUDGET}")
        words += [f"--context-parallel-size {self.cp}"] * (self.cp > 1)
        words += [f"--tensor-model-parallel-size {self.tp}"] * (self.tp > 1)
        words += ["--sequence-parallel"] * self.sp
        words += [f"--pipeline-model-parallel-size {self.pp}"] * (self.pp > 1)
        words += ["--qkv-format bshd"] * self.padded
        whole_experts = kind.expert_parallel > 1 and not kind.cut_experts
        words += ["--expert-tensor-parallel-size 1"] * (self.tp > 1 and whole_experts)
        return " ".join([*words, kind.flags])


def splits(backend: str) -> Iterator[Split]:
    """Yield all rows of a backend; the remaining ranks are replicas (DP)."""
    shared = ((1, False, 1),) if backend == "fsdp" else ((t, s, p) for t, s in ((1, 0), (2, 0), (2, 1)) for p in (1, 2))
    ways = [(tp, bool(sp), pp) for tp, sp, pp in shared]
    for ranks, (tp, sp, pp), cp in itertools.product((1, 2, 4), ways, (1, 2, 4, 0)):
        size = tp * pp * max(cp, 1)
        if ranks % size == 0 and (cp or ranks > tp * pp):
            yield Split(backend, ranks, cp, tp, sp, pp)
            if cp == 1:
                yield Split(backend, ranks, cp, tp, sp, pp, padded=True)


@lru_cache(None)
def refusal(split: Split, kind: Kind, folder: Path) -> str | None:
    """Return the validator's message; None if it accepts the layout. ``folder`` is for the model's config."""
    model = folder / kind.config
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(DENSE if kind.config == "dense" else EXPERTS))
    try:
        validate(parse(f"--hf-checkpoint {model} {COMMAND} {split.flags(kind)}".split()))
    except ValueError as error:
        return str(error)
    return None


# Layouts beyond the table that are refused as well: flags, and the model.
ALSO_REFUSED = (
    ("--train-backend fsdp --actor-num-gpus-per-node 2 --context-parallel-size 2 --qkv-format bshd", "dense"),
    (
        "--train-backend megatron --actor-num-gpus-per-node 2 --dynamic-context-parallel "
        "--max-seqlen-per-dp-cp-rank 64 --qkv-format bshd",
        "dense",
    ),
    (
        "--train-backend megatron --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
        "experts",
    ),
    ("--train-backend megatron --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1", "experts"),
    ("--train-backend megatron --moe-token-dispatcher-type allgather", "experts"),
    (
        "--train-backend megatron --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 "
        "--virtual-pipeline-model-parallel-size 2",
        "dense",
    ),
    ("--train-backend megatron --use-distributed-optimizer --overlap-param-gather", "dense"),
    (f"--train-backend megatron --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 {MTP_FLAGS}", "tied"),
    (
        "--train-backend fsdp --actor-num-gpus-per-node 2 --context-parallel-size 2 --dynamic-context-parallel "
        "--max-seqlen-per-dp-cp-rank 64",
        "dense",
    ),
)


def also_refused(flags: str, config: str, folder: Path) -> str:
    """Return the validator's message. Raises ``AssertionError`` if there is none."""
    model = folder / config
    model.mkdir(exist_ok=True)
    shape = EXPERTS if config == "experts" else DENSE | {"tie_word_embeddings": config == "tied"}
    (model / "config.json").write_text(json.dumps(shape))
    try:
        validate(parse(f"--hf-checkpoint {model} {COMMAND} {flags}".split()))
    except ValueError as error:
        return str(error)
    raise AssertionError(f"accepted: {flags}")
