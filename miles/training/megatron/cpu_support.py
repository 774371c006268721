"""Lets megatron-core run on CPU over gloo: call ``support_cpu`` once in a trainer process on CPU.

Megatron writes CUDA when it means "this rank's device". Each function below states which calls it replaces; all can be
deleted once Megatron asks ``torch.accelerator`` or the tensor instead. Nothing here changes a result.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import _device

from miles.base.attributes import set_within


def support_cpu() -> None:
    """Patch torch and Megatron for CPU. Call it on the training thread, before importing Megatron. Idempotent."""
    current_device: Any = torch.cuda.current_device
    if current_device is _current_device:
        return
    _replace_device()
    _replace_constructors()
    _replace_tensor_methods()
    _import_uncompiled()
    _keep_random_state()
    _avoid_transformer_engine()
    _pad_unequal_parts()


def _current_device() -> torch.device:
    return torch.device("cpu")


def _replace_device() -> None:
    """Replace ``torch.cuda.current_device()``, and synchronizing and streams around communication."""
    cuda: Any = torch.cuda
    cuda.current_device = _current_device
    cuda.synchronize = lambda device=None: None
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = _NoStream
    cuda.current_stream = lambda device=None: _NoStream()


class _NoStream:
    """A stream, or its event, without work to wait for: work on CPU is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)


def _replace_constructors() -> None:
    """Replace ``torch.zeros(…, device="cuda")`` and its like, which schedules, optimizers and experts call.

    These are plain functions and not a mode (``TorchFunctionMode``), through which every operation of the process, and
    every look at a tensor's shape, would pass: a fifth of a small step's time.
    """
    # ``torch.device("meta")`` as a context looks functions up in this table, which torch makes once, of the originals.
    for function in _device._device_constructors():
        name = function.__name__
        if hasattr(torch, name) and getattr(torch, name) is function:  # not functions of torch.fft and torch.nested
            setattr(torch, name, _on_cpu(function))
    for name in ("empty_like", "zeros_like", "ones_like", "full_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(constructor)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if (device := kwargs.get("device")) is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return constructor(*args, **kwargs)

    return construct


def _replace_tensor_methods() -> None:
    """Replace ``tensor.cuda()``, and ``tensor.type() == "torch.cuda.FloatTensor"``: optimizers sort by the type."""
    tensor: Any = torch.Tensor
    type_of = tensor.type

    def type_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)  # under a mode (``TorchFunctionMode``), torch calls this function again
        is_of_cpu = isinstance(result, str) and not result.startswith("torch.cuda.")
        return result.replace("torch.", "torch.cuda.") if is_of_cpu else result

    tensor.cuda = lambda self, *_, **__: self
    tensor.type = type_on_gpu


def _import_uncompiled() -> None:
    """Import Megatron with its small functions as written.

    They are marked for ``torch.compile``, which imports its compiler for GPU kernels at the first mark: 1 s of
    processor time in every rank. Functions marked later follow the choice that ``megatron.core.jit`` makes here.
    """
    with set_within(torch, compile=_as_written):
        importlib.import_module("megatron.core.jit")


def _as_written(function: Any = None, **_: Any) -> Any:
    return _as_written if function is None else function


def _keep_random_state() -> None:
    """Use the CPU's random state, where tensor-parallel ranks fork CUDA's for dropout and recomputation.

    Megatron warns when CPU's has changed meanwhile, which is the purpose here.
    """
    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.manual_seed = torch.default_generator.manual_seed
    from megatron.core.tensor_parallel import random

    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _avoid_transformer_engine() -> None:
    """Use Megatron's own functions if Transformer Engine is installed: its kernels need a GPU."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.multi_tensor_scale_tensor_impl = None  # in later releases
    moe_utils.te_general_gemm = None
    # Splits become NumPy arrays, which the all-to-all wants, only when a tensor comes from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _pad_unequal_parts() -> None:
    """Pad the parts that ranks exchange to the longest, and drop the padding on arrival.

    Ranks that share an expert's matrices exchange the tokens that were routed to each, which are unequal numbers. NCCL
    accepts that in one call, gloo does not.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        whole = gather(_padded(part, max(output_split_sizes)), group)
        parts = zip(whole.chunk(group.size()), output_split_sizes, strict=True)
        return torch.cat([chunk[:size] for chunk, size in parts])

    def reduce_parts(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        parts = [_padded(part, max(input_split_sizes)) for part in whole.split(input_split_sizes)]
        return reduce_scatter(torch.cat(parts), group)[: input_split_sizes[group.rank()]]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_parts, reduce_parts


def _padded(part: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
