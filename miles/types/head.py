"""The product of hidden states with an output head, which the trainer and the embedded engine compute alike."""

import torch


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, fp32: bool = False
) -> torch.Tensor:
    """Compute ``hidden @ weight.T + bias``, [R, V]; in fp32 and unrounded if ``fp32``, without a gradient.

    Products of two bf16 numbers are exact in fp32, so results differ only by the order of their sums. GPUs sum in fp32
    without a copy of the head (``out_dtype``); elsewhere the head is copied.
    """
    if not fp32 or hidden.dtype != torch.bfloat16:
        return torch.nn.functional.linear(hidden, weight, bias)
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)
    return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
