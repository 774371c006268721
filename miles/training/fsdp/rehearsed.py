"""The FSDP2 backend without weights (training/backend.py)."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from miles.base.attributes import set_within
from miles.config.settings import Settings
from miles.training.backend import LeaveOut, RehearsedBackend
from miles.training.fsdp.backend import FsdpBackend, FsdpModelBuilder
from miles.training.fsdp.models import Policy, ShardedModule, build_model, decoder_layers
from miles.training.fsdp.runner import FsdpTrainedModel
from miles.types.train_batch import TrainShard


class _BuilderWithoutWeights(FsdpModelBuilder):
    """Builds models whose tensors are fake, and leaves out layers that are like others."""

    def __init__(self, settings: Settings, device: torch.device, total_steps: int, leave_out: LeaveOut) -> None:
        super().__init__(settings, device, total_steps)
        self._leave_out = leave_out
        self._removed: list[tuple[nn.Module, int]] = []  # of the model that is being built: equal layers, how many

    def _read(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        """Build the model, and remove the layers that are left out: to shard them takes most of the time.

        One rank keeps the gathered weights of every layer, and routers that replay need every layer's experts.
        """
        model = build_model(path, dtype)
        replays = self.settings.rollout.use_rollout_routing_replay or self.settings.training.use_routing_replay
        name, layers = decoder_layers(model)
        left_out = () if replays or self.mesh.size() == 1 else self._leave_out(list(layers))
        running = [place for place in range(len(layers)) if place not in left_out]
        self._removed = [
            (layers[place], following - place - 1)
            for place, following in pairwise([*running, len(layers)])
            if following > place + 1
        ]
        model.base_model.set_submodule(name, nn.ModuleList(layers[place] for place in running))
        config = model.config.get_text_config()
        if kinds := getattr(config, "layer_types", None):  # some models look there, by index
            config.layer_types = [kinds[place] for place in running]
        return model

    def _shard(self, model: ShardedModule[Any]) -> None:
        """Shard the layers that run, and let the one before those that are left out hold as much as these do."""
        super()._shard(model)
        for layer, times in self._removed:
            layer.left_out = nn.ParameterList(_as_large(p) for _ in range(times) for p in layer.parameters())

    def _read_frozen(self, folder: Path, model: Policy, name: str) -> None:
        """Read nothing."""

    def _check(self, policy: Policy, flag: str, path: str) -> None:
        """Compare nothing: there are no values."""


class RehearsedFsdp(FsdpBackend):
    """One rank under fake tensors."""

    reads_on_host = True
    reducing: Callable[[], AbstractContextManager[None]] = nullcontext  # not entered: every micro-batch reduces
    starting: Callable[[], None] = staticmethod(lambda: None)

    def sum_over_ranks(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Exchange the sums; their values are not known."""
        return dict.fromkeys(super().sum_over_ranks(sums), 0.0)

    @property
    def vocabulary(self) -> int:
        """The width of the logits."""
        return int(self.policy.module.language_model.config.get_text_config().vocab_size)

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield every rank's part of the parameters, and the buffers."""
        for model in self.models():
            for tensor in (*model.module.parameters(), *model.module.buffers()):
                yield _local(tensor)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the reduced gradients of this rank's part."""
        for model in self.models():
            for parameter in model.module.parameters():
                if parameter.grad is not None:
                    yield _local(parameter.grad)

    def optimizer_states(self) -> Iterator[torch.Tensor]:
        """Yield the moments."""
        for model in (self.policy, self.critic):
            states = () if model is None else model.optimizer.adam.state.values()
            for state in states:
                yield from (_local(value) for value in state.values() if isinstance(value, torch.Tensor))

    def expect(self, shard: TrainShard) -> None:
        """Prepare nothing: micro-batches do not depend on each other."""

    def hold_gradients(self, model: FsdpTrainedModel) -> None:  # type: ignore[type-arg]
        """Give every parameter that the optimizer has, and that has no gradient, one of zeros."""
        for group in model.optimizer.adam.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def allocate_states(self, model: FsdpTrainedModel) -> None:  # type: ignore[type-arg]
        """Allocate the moments, and do not compute with them: a step takes a third of the time of a rehearsal."""
        adam = model.optimizer.adam
        _group_by_type(adam)
        self.hold_gradients(model)
        for group in adam.param_groups:
            adam._init_group(group, [], [], [], [], [], [])
        adam.zero_grad()

    def traced_micro_batches(self, micro_batches: int) -> int:
        """Return one: micro-batches run one after another."""
        return 1

    def micro_batches_in_flight(self, micro_batches: int) -> int:
        """Return one."""
        return 1


def _as_large(weight: nn.Parameter) -> nn.Parameter:
    """Return a parameter that takes the memory of this rank's part of ``weight``, padding included."""
    local = _local(weight.detach())
    numbers = local.untyped_storage().nbytes() // local.itemsize
    is_padded = numbers > local.numel()
    held = local.new_empty(numbers)[: local.numel()].view(local.shape) if is_padded else local.new_empty(local.shape)
    return nn.Parameter(held, requires_grad=weight.requires_grad)


def _group_by_type(adam: torch.optim.AdamW) -> None:
    """Give sharded and other parameters groups of their own: one fused operation does not take both."""
    for group in list(adam.param_groups):
        others = [p for p in group["params"] if not isinstance(p, DTensor)]
        if others:
            group["params"] = [p for p in group["params"] if isinstance(p, DTensor)]
            adam.add_param_group({**group, "params": others})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part. ``to_local`` would run two operations for each of them."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Parts:
    """Equal parts of a tensor along a dimension, as ``torch.chunk`` makes them, each made when it is asked for.

    FSDP cuts every parameter into a part for each rank, and reads the first part and its own. Making a thousand views
    of every parameter would take most of the time of a rehearsal.
    """

    def __init__(self, whole: torch.Tensor, number: int, dim: int) -> None:
        self._whole, self._dim = whole, dim
        self._length = -(-whole.size(dim) // number)

    def __getitem__(self, place: int) -> torch.Tensor:
        start = place * self._length
        length = min(self._length, self._whole.size(self._dim) - start)
        return self._whole.narrow(self._dim, start, length) if length > 0 else self._whole.new_empty(0)


def build(
    settings: Settings, device: torch.device, total_steps: int, leave_out: LeaveOut, imbalance: float
) -> AbstractContextManager[RehearsedBackend]:
    """Build this rank. Every rank has all experts, so their load is as large whatever the router does."""
    if settings.lora.trains_adapter:
        importlib.import_module("peft")  # its modules hold tensors that are not part of this rank's model
    return _built(settings, device, total_steps, leave_out)


@contextmanager
def _built(
    settings: Settings, device: torch.device, total_steps: int, leave_out: LeaveOut
) -> Iterator[RehearsedBackend]:
    with set_within(_fsdp_param, _chunk_with_empty=_Parts):
        yield RehearsedFsdp(settings, device, total_steps, partial(_BuilderWithoutWeights, leave_out=leave_out))
