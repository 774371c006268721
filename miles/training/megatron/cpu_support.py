"""What megatron-core 0.16.1 needs to run on CPU over gloo: ``support_cpu``, once, in a trainer process on CPU.

Megatron names CUDA where it means "this rank's device". Every entry below says what it answers for; all can go when
Megatron asks ``torch.accelerator`` or the tensor instead. Nothing here changes a result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def support_cpu() -> None:
    """Before anything of Megatron is imported, on the thread that will train. Idempotent."""
    if torch.cuda.current_device is _current_device:
        return
    _answer_for_the_device()
    _CudaMeansCpu().__enter__()  # for the life of the process
    _keep_random_state()
    _do_without_transformer_engine()


def _current_device() -> torch.device:
    return torch.device("cpu")


def _answer_for_the_device() -> None:
    """``device=torch.cuda.current_device()`` all over Megatron; synchronizing and streams around communication."""
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.Stream = _NoStream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda device=None: _NoStream()  # type: ignore[assignment,return-value]


class _NoStream:
    """Work on CPU is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    __hash__ = None  # type: ignore[assignment]


class _CudaMeansCpu(TorchFunctionMode):
    """``torch.zeros(…, device="cuda")`` in schedules, optimizers and mixture of experts; ``tensor.cuda()``; and
    ``tensor.type() == "torch.cuda.FloatTensor"``, by which the optimizers sort parameters.

    A mode, not a patch of torch's functions: those stand in tables of torch itself (``torch.device("meta")`` as a
    context), in which a replaced function is not found.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


def _keep_random_state() -> None:
    """The random states that tensor-parallel ranks fork for dropout and recomputation are CUDA's."""
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _do_without_transformer_engine() -> None:
    """The router reads a name that is only bound where Transformer Engine is installed (0.16.1: ``NameError``)."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    # Splits become NumPy arrays, which the all-to-all wants, only when a tensor comes from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
