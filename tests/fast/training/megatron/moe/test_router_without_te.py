"""The router computes without Transformer Engine in a process on a GPU, where nothing of ``cpu_support`` is patched."""

from __future__ import annotations

import subprocess
import sys

ROUTE = """
import torch
import miles.training.megatron.moe.router
from megatron.core.transformer.moe.moe_utils import router_gating_linear

tokens, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
router_gating_linear(tokens, weight, None, torch.float32).sum().backward()
assert torch.allclose(weight.grad, tokens.detach().sum(0).expand(2, 4))
"""


def test_gating() -> None:
    done = subprocess.run([sys.executable, "-c", ROUTE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
