"""Compare three steps with the optimizer in host memory with ordinary ones: ``python offloaded_optimizer.py FOLDER``.

Prints one JSON object: the largest difference of weights and of optimizer state, relative to the largest of their
tensor, and the bytes per parameter that each way takes on the GPU after its steps.
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

DIVIDED = MegatronArguments(use_distributed_optimizer=True)
WAYS = {
    "offloaded": replace(DIVIDED, optimizer_cpu_offload=True),
    "overlapped": replace(DIVIDED, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True),
    "half": replace(DIVIDED, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
}


def trained(path: Path, sizes: MegatronArguments) -> tuple[dict[str, torch.Tensor], float]:
    """Return weights and state after three steps, and bytes per parameter on the GPU."""
    from miles.training.megatron.checkpoint import AdamState

    case = Case(BATCHES["compacted"], loss_of("sample_mean"), ONE, seed=5)
    batch = batch_of(case)
    # The large epsilon keeps Adam from taking full steps on gradients that are only rounding errors.
    optimizer = OptimizerArguments(lr=1e-3, weight_decay=0.1, adam_eps=1e-3)
    before = torch.cuda.memory_allocated()
    backend: Any = make_backend(replace(settings_of("megatron", path, case.loss), optimizer=optimizer, megatron=sizes))
    for _ in range(3):
        train(backend, batch)
    torch.cuda.synchronize()
    named = dict(backend.policy.stage.named_parameters())
    held = (torch.cuda.memory_allocated() - before) / sum(p.numel() for p in named.values())
    adam, tensors = AdamState(backend.policy.optimizer.adam), {}
    for name, parameter in named.items():
        tensors[name] = parameter.detach().double().cpu()
        pieces = adam.piece(parameter).tensors
        tensors |= {f"{name} {kind}": tensor.double().cpu() for kind, tensor in pieces.items()}
    return tensors, held


def main(folder: Path) -> None:
    path = start(folder)
    wanted, ordinary = trained(path, DIVIDED)
    report: dict[str, Any] = {"ordinary": {"bytes": ordinary}}
    for way, sizes in WAYS.items():
        state, held = trained(path, sizes)
        assert state.keys() == wanted.keys()
        differences = {"weights": 0.0, "state": 0.0}
        for name, tensor in wanted.items():
            kind = "state" if " " in name else "weights"
            difference = (state[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30)
            differences[kind] = max(differences[kind], difference.item())
        report[way] = differences | {"bytes": held}
    print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
