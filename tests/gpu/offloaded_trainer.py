"""Compare steps with the trainer offloaded after each with ordinary ones: ``offloaded_trainer.py BACKEND FOLDER``.

BACKEND is ``fsdp``, ``megatron`` or ``megatron, distributed optimizer``. Prints one JSON object: whether the weights
after three steps are equal, and the bytes per parameter on the GPU after a step and while the trainer is offloaded.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import BATCHES, Case, loss_of
from one_gpu import ONE, batch_of, make_backend, settings_of, start, train

from miles.config.megatron.settings import MegatronArguments
from miles.config.optimizer import OptimizerArguments
from miles.training.optimizer import be_deterministic

CASE = Case(BATCHES["compacted"], loss_of("sample_mean"), ONE, seed=5)
OPTIMIZER = OptimizerArguments(lr=1e-3, weight_decay=0.1, adam_eps=1e-3)


def trained(name: str, path: Path, moves: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the weights after three steps, and bytes per parameter on the GPU."""
    batch = batch_of(CASE)
    sizes = MegatronArguments(use_distributed_optimizer="distributed optimizer" in name)
    settings = settings_of(name.partition(",")[0], path, CASE.loss)
    before = torch.cuda.memory_allocated()
    backend: Any = make_backend(replace(settings, optimizer=OPTIMIZER, megatron=sizes))
    held = {}
    for _ in range(3):
        train(backend, batch)
        if moves:
            held["trained"] = torch.cuda.memory_allocated() - before
            backend.offload()
            held["offloaded"] = torch.cuda.memory_allocated() - before
            backend.onload()
    weights = {n: tensor for chunk in backend.export_weights() for n, tensor in chunk.tensors.items()}
    count = sum(weight.numel() for weight in weights.values())
    return weights, {kind: size / count for kind, size in held.items()}


def main(name: str, folder: Path) -> None:
    be_deterministic()  # else equal steps may differ in the last bits
    path = start(folder)
    wanted, _ = trained(name, path, moves=False)
    tensors, held = trained(name, path, moves=True)
    is_equal = wanted.keys() == tensors.keys() and all(torch.equal(tensors[n], weight) for n, weight in wanted.items())
    print(json.dumps({"is_equal": is_equal} | held), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
