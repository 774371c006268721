"""Megatron's AdamW under the schedule of training/optimizer.py."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.parallel_state import get_global_memory_buffer

from miles.config.optimizer import OptimizerArguments
from miles.training.optimizer import ScheduledOptimizer

# Megatron takes Adam from Transformer Engine or Apex if they are installed. Theirs keep the number of steps in another
# field, and need a GPU: every run has torch's, whose state checkpoints are made of (optimizer_state.py).
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
megatron.core.optimizer.Adam = torch.optim.AdamW  # of what --optimizer-cpu-offload leaves on the GPU


class MegatronOptimizer(ScheduledOptimizer):
    """fp32 AdamW over the gradient buffers of the model's chunks. Weight decay applies to matrices only.

    With ``config.optimizer_cpu_offload`` its state, and the fp32 weights, are in host memory and are updated there
    (Megatron's ``HybridDeviceOptimizer``).
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        settings: OptimizerArguments,
        total_steps: int,
        rate_flag: str = "--lr",
    ) -> None:
        super().__init__(settings, total_steps, rate_flag)
        # The overrides exempt norms and biases from weight decay; Megatron's scheduler, which would apply them, is not
        # used: the schedule is one for both backends.
        overrides = get_standard_config_overrides(config)
        # Of fp32 weights (of the canary, and of adapters) the distributed optimizer takes views, which torch's Adam in
        # host memory accepts only without a graph.
        with torch.no_grad() if config.optimizer_cpu_offload else nullcontext():
            self.adam = get_megatron_optimizer(config, [*models], overrides, use_gloo_process_groups=False)
        for group in self.adam.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            group["fused"] = True  # torch's AdamW loops over tensors by default
        self._models = models

    def _gradient_norm(self) -> float:
        self.adam.prepare_grads()
        return float(self.adam.get_grad_norm())

    def _clip_and_update(self, norm: float) -> None:
        updated, _norm, _zeros = self.adam.step()  # clips on its own
        assert updated, "only a loss scaler, which fp16 has, refuses an update"

    def _clear(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self.adam.zero_grad()


# A rank's state, which waits in host memory while engines use its GPU (``--offload-train``).
#
# Megatron's parameters, gradients and fp32 copies are views of a few large buffers, and several objects have views of
# the
# same buffer. So storages are emptied and filled again: every view stays unchanged, on CPU as on a GPU.


class HostCopies:
    """Host copies of what was taken off a device; empty while nothing is."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []

    def take(self, tensors: Iterable[torch.Tensor], zeros: Iterable[torch.Tensor], device: torch.device) -> None:
        """Copy the storages of ``tensors`` and empty them.

        Args:
            tensors: Those on other devices stay unchanged. Several may share a storage.
            zeros: Those whose storages hold zeros, which are not copied: one pass over them checks it.
            device: The device whose memory is freed.
        """
        assert not self._copies and not self._zeros, "onload() comes before the next offload()"
        of_zeros = _storages(zeros, device)
        assert not any(_bytes_of(storage).any() for storage in of_zeros), "gradients are not 0 between two steps"
        for storage in of_zeros:
            self._zeros.append((storage, storage.nbytes()))
            storage.resize_(0)
        for storage in _storages(tensors, device):
            self._copies.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)

    def give_back(self) -> None:
        """Fill the storages again."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
        for storage, size in self._zeros:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._copies, self._zeros = [], []


def gradients(models: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield the gradients of ``models``, which are 0 between steps."""
    for model in models:
        for buffer in model.buffers + model.expert_parallel_buffers:
            yield buffer.grad_data


def model_state(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers. With the distributed optimizer, parameters are views of the gathered buffers."""
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def optimizer_state(adam: Any) -> Iterator[torch.Tensor]:
    """Yield fp32 weights and moments of Megatron's optimizer ``adam``."""
    for part in adam.chained_optimizers if isinstance(adam, ChainedOptimizer) else [adam]:
        if part.optimizer is not None:  # None: the rank has no such parameter
            yield from _state(part.optimizer)


def free_buffers_of_layers() -> None:
    """Drop the buffers into which sequence-parallel layers gather; they make new ones."""
    get_global_memory_buffer().buffer.clear()


def _state(adam: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in adam.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for state in adam.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    if isinstance(adam, HybridDeviceOptimizer):
        for part in adam.sub_optimizers:
            yield from _state(part)


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages on ``device``, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
