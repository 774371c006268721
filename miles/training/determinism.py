"""Have torch compute the same bits in every run: ``--deterministic-mode``."""

from __future__ import annotations

import os

# Read by cuBLAS and NCCL when they start: one workspace for each stream, and one order of a sum over ranks.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def be_deterministic() -> None:
    """Choose deterministic kernels, before the first of them runs; operations that have none raise ``RuntimeError``.

    What the user has set in the environment stays.
    """
    import torch  # not at the top: the launcher imports this module

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
