"""Layers with recurrent state (linear attention, Mamba) on packed samples: each sample begins with an empty state.

Such a layer is a causal convolution over a few tokens and a scan over all of them, and both would pass from one packed
sample to the next. The layer therefore gets the rows that attention gets (packed_attention.py): each sample is a row, a
shared token is in the row of each of its samples, and padding is to the right, which a causal layer does not see.
All other layers keep the packed tokens.

That needs nothing of a layer but that it is causal, so the kernels of fla, causal-conv1d and mamba-ssm on a GPU are
called as transformers' own code on CPU is: with rows that begin at their first token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from miles.training.packed_attention import PackedLayout


def reset_states_between_samples(model: nn.Module) -> None:
    """Make every layer of ``model`` with recurrent state compute packed samples one by one, in place.

    In transformers it is a module with a causal convolution of its own. One whose decoder layer does not hand keyword
    arguments on to it (jamba, lfm2) is not told the layout, and the check at the start of a run refuses the model.
    """
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_by_sample, module.forward)


def _by_sample(
    forward: Callable[..., torch.Tensor], *args: Any, packed: PackedLayout | None = None, **given: Any
) -> torch.Tensor:
    """Compute a layer on hidden states [1, T, hidden] of packed samples; same shape.

    Rows of padded samples, and whatever comes without a layout, are computed as they are.
    """
    if packed is None or packed.padded:
        return forward(*args, **given)
    assert packed.context.size == 1, "validate() refuses ranks that share the sequences of such a model"
    assert given.get("attention_mask") is None
    hidden_states = args[0] if args else given.pop("hidden_states")
    tokens = hidden_states[0]
    out = torch.zeros_like(tokens)
    for rows in packed.rows:
        # A token that several samples share is computed in the row of each; one copy is kept.
        out = rows.put_from_keys(forward(rows.of_keys(tokens), *args[1:], **given), out)
    return out.unsqueeze(0)
