"""Run ``sglang.launch_server`` faster on CPU: ``python -m sglang_on_cpu ARGUMENTS…``.

SGLang spawns its scheduler and detokenizer, because CUDA does not survive a fork. Each then repeats the server's
imports, which takes 16 of the 25 s of CPU time that a start takes. Here they are forked instead. That is safe because
the server has started no thread by then, and each of them publishes its own configuration. In addition, the sequences
of a batch are decoded at once (``batched_decode``), and kernels are declared that are never called: the module for
images of Qwen-VL imports another model's module, which names them.
"""

import multiprocessing
import runpy
from typing import Any

from batched_decode import batched_decode
from torch.library import Library

NAMED_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)

_set_start_method = multiprocessing.set_start_method


def _fork(method: str | None, force: bool = False) -> None:
    """Choose fork. SGLang calls this to choose spawn, last before it starts processes (srt/entrypoints/engine.py)."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    _set_start_method("fork", force=True)
    backend: Any = TorchNativeAttnBackend
    backend._run_sdpa_forward_decode = batched_decode(backend._run_sdpa_forward_decode)


if __name__ == "__main__":
    kernels = Library("sgl_kernel", "DEF")
    for name in NAMED_KERNELS:
        kernels.define(f"{name}(Tensor unused) -> Tensor")
    replaced: Any = multiprocessing
    replaced.set_start_method = _fork
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
