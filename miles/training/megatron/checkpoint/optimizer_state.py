"""Adam's state by model parameter, for all of Megatron's optimizers.

Megatron keeps it in four forms: for fp32 models beside the parameter, for bf16 models beside an fp32 copy, with
``--use-distributed-optimizer`` in flat pieces on the data-parallel ranks, and with ``--optimizer-cpu-offload`` in such
pieces in host memory. Here all of them look the same, so that a checkpoint written under one can be read under another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """The part of a parameter's state on one rank: elements ``start`` to ``stop``, counted row by row."""

    start: int
    stop: int
    is_cut: bool  # whether the data-parallel ranks hold different elements, or all the same
    tensors: dict[str, torch.Tensor]  # flat, by kind; without the moments before the first step


class AdamState:
    """The state of the optimizers behind ``adam``.

    ``parameter`` is a parameter of the model, or a buffer, which the optimizer does not have and every rank has whole.
    """

    def __init__(self, adam: Any) -> None:
        parts = adam.chained_optimizers if isinstance(adam, ChainedOptimizer) else [adam]
        self._optimizers = parts
        sharded = [part for part in parts if isinstance(part, DistributedOptimizer)]
        self._sharded = {p: part for part in sharded for p in _tracked(part)}
        self._held = {p: held for part in sharded for p, held in _held(part)}
        self._owner = {main: part for part in parts for group in _groups(part) for main in group["params"]}

    def piece(self, parameter: torch.Tensor) -> Piece:
        """Return this rank's part of the state of ``parameter``. Nothing is copied or sent."""
        if not isinstance(parameter, torch.nn.Parameter):
            return Piece(0, parameter.numel(), False, {MASTER: parameter.view(-1)})
        main, place, adam = self._find(parameter)
        is_cut = parameter in self._sharded
        if main is None:
            return Piece(0, 0, is_cut, {})
        state = adam.state.get(main, {})
        held = {MASTER: main} | {name: state[name] for name in MOMENTS if name in state}
        start, stop, _ = place.indices(parameter.numel())
        return Piece(start, stop, is_cut, {kind: tensor.detach().view(-1) for kind, tensor in held.items()})

    @torch.no_grad()
    def restore(self, parameter: torch.Tensor, whole: dict[str, torch.Tensor], steps: int) -> None:
        """Restore the state of ``parameter``. Not collective.

        Args:
            parameter: The model's parameter or buffer, which is set too.
            whole: Tensors of the parameter's shape by kind. Without the moments, Adam starts again.
            steps: Steps taken when they were saved.
        """
        parameter.copy_(whole[MASTER])
        if not isinstance(parameter, torch.nn.Parameter):
            return
        main, place, adam = self._find(parameter)
        if main is None:
            return
        main.copy_(whole[MASTER].view(-1)[place].view(main.shape))
        state = adam.state
        state.pop(main, None)
        if MOMENTS[0] not in whole:
            return
        state[main] = {
            name: whole[name].view(-1)[place].view(main.shape).to(main.device, main.dtype, copy=True)
            for name in MOMENTS
        }
        state[main]["step"] = torch.tensor(float(steps), device=main.device)  # as the fused kernel expects

    def _find(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, slice, Any]:
        """Return the tensor that Adam updates for it on this rank (or None), its place in it, and torch's optimizer."""
        part = self._sharded.get(parameter)
        if part is None:
            main = getattr(parameter, "main_param", parameter)
            return main, slice(None), self._owner[main].optimizer
        if parameter not in part.model_param_gbuf_map:
            return None, slice(0, 0), part.optimizer
        place = part._get_model_param_range_map(parameter)["param"]
        held, adam = self._held[parameter], part.optimizer
        if isinstance(adam, HybridDeviceOptimizer):
            held = adam.param_to_inner_param[held]  # fp32, and in host memory if it is offloaded
            adam = _optimizer_of(held, adam.sub_optimizers)
        return held, slice(place.start, place.end), adam


def _optimizer_of(held: torch.Tensor, optimizers: list[Any]) -> Any:
    """Return the optimizer that updates ``held``."""
    return next(adam for adam in optimizers for group in adam.param_groups for p in group["params"] if p is held)


def _groups(part: Any) -> list[dict[str, Any]]:
    return [] if part.optimizer is None else part.optimizer.param_groups


def _held(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter that this rank has a part of, and the tensor of the optimizer with that part.

    Megatron's ``model_param_group_index_map`` has another order if the parameters of a group have two dtypes and so
    are in several gradient buffers: among the tensors the fp32 ones come first (optimizer/distrib_optimizer.py,
    ``_build_model_and_main_param_groups``).
    """
    for in_fp32, in_bf16, group in zip(part.model_fp32_groups, part.model_float16_groups, _groups(part), strict=True):
        yield from zip((*in_fp32, *in_bf16), group["params"], strict=True)


def _tracked(part: DistributedOptimizer) -> Iterator[torch.nn.Parameter]:
    for buffer in part.buffers:
        yield from buffer.param_index_map
