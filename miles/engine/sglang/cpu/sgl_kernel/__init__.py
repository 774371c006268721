"""Answer every import with a function that raises: these kernels do not exist on CPU."""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel, and this server runs on CPU")

    return kernel
