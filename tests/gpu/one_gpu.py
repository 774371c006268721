"""Compare one backend on one GPU in bf16 with an fp32 oracle: ``python one_gpu.py BACKEND MODEL FOLDER``.

BACKEND is ``fsdp`` or ``megatron``, MODEL ``dense`` or ``experts``. Prints one JSON object: the distance from the
oracle for each contract and for padded rows, and the tokens per second and peak memory of a larger step.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import BATCHES, TEMPERATURE, Case, Layout, groups_of, loss_of, rows_of
from compare import samples_of, wanted
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM

from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.config.cluster import ClusterArguments
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments
from miles.config.optimizer import OptimizerArguments
from miles.config.parallel import ParallelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.training.backend import build_backend
from miles.training.trainer import Trainer
from miles.types.train_batch import TrainBatch

PACKED, PADDED = ParallelArguments(), ParallelArguments(qkv_format="bshd")
TRAINED = {
    "averages": ("sample_mean", PACKED),
    "counts tokens": ("token_mean", PACKED),
    "padded": ("token_mean", PADDED),
}
ONE = Layout("one GPU", 1)
SHAPE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    initializer_range=0.05,
    max_position_embeddings=2048,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
CONFIGS = {
    "dense": LlamaConfig(**SHAPE),
    # Every token goes to every expert. With fewer, bf16 and fp32 routers would choose differently among nearly equal
    # experts, and one such choice changes the gradient by more than all rounding.
    "experts": Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=4, norm_topk_prob=True
    ),
}
WARM_UP, TIMED = 2, 5


def settings_of(backend: str, path: Path, loss: LossArguments, parallel: ParallelArguments = PACKED) -> Settings:
    return Settings(
        cluster=ClusterArguments(actor_num_gpus_per_node=1),
        model=ModelArguments(hf_checkpoint=str(path)),
        rollout=RolloutArguments(rollout_temperature=TEMPERATURE),
        loss=loss,
        optimizer=OptimizerArguments(lr=0.0, weight_decay=0.0, clip_grad=0.0),
        training=TrainingArguments(micro_batch_size=4, bf16=True, train_backend=backend),  # type: ignore[arg-type]
        parallel=parallel,
        megatron=MegatronArguments(),
    )


def start(folder: Path, model: str = "dense") -> Path:
    """Join a group of one rank on the first GPU; return the path of a new model of ``CONFIGS``, the same each time."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    path = folder / "model"
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[model]).save_pretrained(path)
    return path


def batch_of(case: Case) -> TrainBatch:
    """Return the samples of ``case`` as one step."""
    rows = rows_of(case)
    trajectories = len({row.sample.trajectory_id for row in rows})
    (batch,) = convert(groups_of(case, rows), loss=case.loss, global_batch_size=trajectories)
    return batch


def make_backend(settings: Settings) -> Any:
    return build_backend(settings, torch.device("cuda", 0), total_steps=100)


class RecordedOptimizer:
    """An optimizer that records the policy's gradients, by Hugging Face name, before it steps."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self) -> Any:
        policy = self.backend.policy
        if hasattr(self.backend, "converter"):
            pairs = self.backend.converter.export(policy.stage, lambda p: p.main_grad, torch.float32)
        else:
            named = policy.module.language_model.named_parameters()
            pairs = ((n, p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) for n, p in named)
        self.gradients = {name: gradient.detach().double().cpu() for name, gradient in pairs}
        return policy.optimizer.step()


def conform(backend: str, path: Path, mode: str, parallel: ParallelArguments) -> float:
    """Return the distance of the whole gradient from the oracle's, relative to the oracle's norm."""
    case = Case(BATCHES["compacted"], loss_of(mode), ONE, seed=5)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").train()
    expected = by_expert(wanted(case, oracle, samples_of(case))[0])
    made = make_backend(settings_of(backend, path, case.loss, parallel))
    recorded = RecordedOptimizer(made)
    train(made, batch_of(case), recorded)
    gradients = by_expert(recorded.gradients)
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    error = torch.stack([(gradients[n] - g.double()).norm() for n, g in expected.items()]).norm()
    return (error / torch.stack([g.double().norm() for g in expected.values()]).norm()).item()


def train(backend: Any, batch: TrainBatch, optimizer: Any = None) -> dict[str, float]:
    (shard,) = schedule_step(batch, 1, backend.settings.training, backend.settings.parallel)
    trainer = Trainer(backend, backend.settings.loss, token_ranks=1)
    if optimizer is not None:
        trainer.policy = replace(trainer.policy, optimizer=optimizer)
    (metrics,) = trainer.train([shard])
    return {name: metric.value for name, metric in metrics.items()}


def by_expert(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients with one entry per expert; some models store all experts in one tensor."""
    by_name: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            by_name[name] = gradient
            continue
        prefix, _, kind = name.rpartition(".")
        kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
        for number, whole in enumerate(gradient):
            parts = whole.chunk(len(kinds))
            by_name |= {f"{prefix}.{number}.{k}.weight": part for k, part in zip(kinds, parts, strict=True)}
    return by_name


def speed(backend: str, path: Path) -> dict[str, float]:
    """Measure a step of 32 samples of 512 response tokens each."""
    spec = tuple(tuple(((1,) * 512,) for _ in range(8)) for _ in range(4))
    case = Case(spec, loss_of("sample_mean"), ONE, seed=1)
    batch = batch_of(case)
    trained = make_backend(settings_of(backend, path, case.loss))
    trained.settings = replace(
        trained.settings,
        training=replace(trained.settings.training, use_dynamic_batch_size=True, max_tokens_per_gpu=8192),
    )
    for _ in range(WARM_UP):
        train(trained, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(TIMED):
        train(trained, batch)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / TIMED
    return {
        "tokens_per_second": sum(batch.total_lengths) / seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 1024**3,
    }


def main(backend: str, model: str, folder: Path) -> None:
    path = start(folder, model)
    report: dict[str, Any] = {name: conform(backend, path, *arguments) for name, arguments in TRAINED.items()}
    print(json.dumps(report | speed(backend, path)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
