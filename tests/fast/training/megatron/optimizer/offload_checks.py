"""The optimizer in host memory (``--optimizer-cpu-offload``), with some CPU tensors treated as if they were on a GPU.

The checks run Megatron's ``HybridDeviceOptimizer`` in its distributed optimizer, and the production code around it.
Only a GPU shows that the copies between both memories are right (tests/gpu/test_offloaded_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from batches import batch_of
from layouts import CPU, RankProcess, make_backend, weights
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from state_checks import ADAM, CASE, PLAIN, _train
from torch.overrides import TorchFunctionMode

from miles.training.checkpoint_files import staging
from miles.training.megatron import backend as backend_module
from miles.training.megatron.backend import MegatronBackend
from miles.training.megatron.checkpoint import AdamState
from miles.training.megatron.model.transformer_config import optimizer_config

KEEPING = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)  # called on a tensor that has just been moved


class TwoMemories(TorchFunctionMode):
    """Every tensor is on the GPU, apart from those that ``cpu()`` returns."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not hasattr(args[0], "is_in_host_memory")
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
        if func is torch.Tensor.cpu:
            result = result.clone()
            result.is_in_host_memory = True
        elif func in KEEPING and hasattr(args[0], "is_in_host_memory"):
            result.is_in_host_memory = True
        return result


@contextmanager
def on_a_gpu() -> Iterator[None]:
    def configured(*arguments: Any) -> Any:
        return optimizer_config(*arguments[:-1], torch.device("cuda"))

    with mock.patch.object(backend_module, "optimizer_config", configured), TwoMemories():
        yield


def _backend(process: RankProcess, bf16: bool, **sizes: Any) -> MegatronBackend:
    plain = make_backend(process, "tied", PLAIN, auxiliary=sizes or {"use_distributed_optimizer": True}, **ADAM)
    if not bf16:
        return plain
    return MegatronBackend(replace(plain.settings, training=replace(plain.settings.training, bf16=True)), CPU, 10)


def _state(backend: MegatronBackend) -> list[torch.Tensor]:
    """Return this rank's part of master weights and moments."""
    adam = AdamState(backend.policy.optimizer.adam)
    pieces = [adam.piece(p) for p in backend.policy.stage.parameters() if p is not backend.policy.stage.canary]
    return [tensor.clone() for piece in pieces for _, tensor in sorted(piece.tensors.items())]


def _equal(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(actual) == len(wanted) and all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


def _are_offloaded(adam: HybridDeviceOptimizer, fraction: float) -> None:
    """Check that the moments of ``fraction`` of this rank's elements are in host memory: no less, and one tensor more.

    A rank of two has half of the elements, in a few large tensors: their number states nothing. A tensor left on the
    GPU in fp32 is not updated, and may only be the canary, which is always 0.
    """
    sizes = {p: p.numel() for group in adam.param_groups for p in group["params"]}
    there = [state["exp_avg"].numel() for part in adam.cpu_optimizers for state in part.state.values()]
    states = [] if adam.gpu_optimizer is None else list(adam.gpu_optimizer.state.values())
    updated = {**adam.gpu_params_map_cpu_copy, **adam.param_to_fp32_param}
    still = [size for p, size in sizes.items() if p not in updated]
    assert still in ([], [1])
    assert sum(there) + sum(state["exp_avg"].numel() for state in states) + sum(still) == sum(sizes.values())
    assert len(there) + len(states) + len(still) == len(sizes)
    wanted = fraction * sum(sizes.values())
    assert wanted <= sum(there) < wanted + max(sizes.values())
    assert (not states) == (fraction == 1)


WAYS: tuple[dict[str, Any], ...] = ({"overlap_cpu_optimizer_d2h_h2d": True}, {}, {"optimizer_offload_fraction": 0.5})
IN_WAYS = ((False, WAYS[:2]), (True, WAYS))  # in fp32 and bf16: the last is refused in fp32
IN_WAYS_BY_TURNS = ((False, WAYS[:1]), (True, WAYS[1:]))


def steps_in_host_memory_are_the_same(process: RankProcess) -> None:
    """Some steps, in fp32 and bf16: weights, master weights and moments are equal bit for bit."""
    steps = 3 if process.whole else 2
    for bf16, ways in IN_WAYS if process.whole else IN_WAYS_BY_TURNS:
        ordinary = _backend(process, bf16)
        for _ in range(steps):
            _train(ordinary, batch_of(CASE))
        for way in ways:
            with on_a_gpu():
                backend = _backend(process, bf16, optimizer_cpu_offload=True, **way)
                for _ in range(steps):
                    _train(backend, batch_of(CASE))
            for part in backend.policy.optimizer.adam.chained_optimizers:
                assert isinstance(part.optimizer, HybridDeviceOptimizer)
                _are_offloaded(part.optimizer, way.get("optimizer_offload_fraction", 1.0))
            assert _equal(_state(backend), _state(ordinary)), way
            wanted = weights(ordinary)
            assert all(torch.equal(weight, wanted[name]) for name, weight in weights(backend).items()), way


def checkpoints_are_the_same(process: RankProcess) -> None:
    """Saved with one optimizer and loaded into the other, either takes the step that the first would have taken."""
    changes = ((True, True), (True, False), (False, False))
    for bf16, saves_offloaded in changes if process.whole else changes[:2]:
        offload = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
        with on_a_gpu():
            options: tuple[dict[str, Any], ...] = (offload, {}) if saves_offloaded else ({}, offload)
            first, second = (_backend(process, bf16, **sizes) for sizes in options)
            _train(first, batch_of(CASE))
            root = process.folder / f"offloaded {process.name} {bf16} {saves_offloaded}"
            if process.rank == 0:
                staging(root, 1)
            dist.barrier()
            first.save(root / ".writing_iter_0000001", {})
            _train(second, batch_of(CASE))  # another state, which is replaced
            second.load(root / ".writing_iter_0000001")
            assert _equal(_state(second), _state(first))
            for backend in (first, second):
                _train(backend, batch_of(CASE))
            assert _equal(_state(second), _state(first))


def on_cpu_the_flag_changes_nothing(process: RankProcess) -> None:
    backend = _backend(process, False, optimizer_cpu_offload=True)
    kinds = [type(part.optimizer) for part in backend.policy.optimizer.adam.chained_optimizers]
    assert kinds == [torch.optim.AdamW]
    arguments = backend.settings.optimizer, backend.settings.megatron, torch.float32
    assert not optimizer_config(*arguments, CPU).optimizer_cpu_offload
    assert optimizer_config(*arguments, torch.device("cuda")).optimizer_cpu_offload


CHECKS = (steps_in_host_memory_are_the_same, checkpoints_are_the_same, on_cpu_the_flag_changes_nothing)
OF_LAYOUT = {"one": CHECKS[2:], "dp2, distributed optimizer": CHECKS[:2], "tp2": CHECKS[:1]}
BY_TURNS = {"one": CHECKS[2:], "dp2, distributed optimizer": CHECKS[:2]}
