"""``sglang.launch_server``, quicker on CPU: ``python -m sglang_on_cpu ARGUMENTS…``.

SGLang starts scheduler and detokenizer anew, because CUDA does not survive a fork. Each then imports what the server
has imported already: of the 25 s of CPU that starting takes, 16. Here they are forked: the server has started no thread
when it makes them, and each publishes a configuration of its own. And the sequences of a batch are decoded at once
(``batched_decode``).
"""

import multiprocessing
import runpy
from typing import Any

from batched_decode import batched_decode

_set_start_method = multiprocessing.set_start_method


def _fork(method: str | None, force: bool = False) -> None:
    """What SGLang calls to ask for ``spawn``, last before it makes processes (srt/entrypoints/engine.py)."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    _set_start_method("fork", force=True)
    backend: Any = TorchNativeAttnBackend
    backend._run_sdpa_forward_decode = batched_decode(backend._run_sdpa_forward_decode)


if __name__ == "__main__":
    replaced: Any = multiprocessing
    replaced.set_start_method = _fork
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
