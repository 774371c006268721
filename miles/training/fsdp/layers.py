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
from transformers import PreTrainedModel

from miles.models.packing import SPARSE, model_type
from miles.training.packed_attention import PackedLayout, Rows


def reset_states_between_samples(model: nn.Module) -> None:
    """Make every layer of ``model`` with recurrent state compute packed samples one by one, in place.

    In transformers it is a module with its own causal convolution. One whose decoder layer does not hand keyword
    arguments on to it (jamba, lfm2) is not told the layout, and the check at the start of a run refuses the model.
    """
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_by_sample, module.forward)


def _by_sample(
    forward: Callable[..., torch.Tensor], *args: Any, packed: PackedLayout | None = None, **given: Any
) -> torch.Tensor:
    """Compute a layer on hidden states [1, T, hidden] of packed samples; same shape.

    Rows of padded samples, and whatever comes without a layout, are computed unchanged.
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


# Sparse attention (deepseek_v32, glm_moe_dsa) on packed or padded samples: each sample chooses among its own keys.
#
# In such a layer an indexer scores the keys that a query may see, and the query attends to the ``index_topk`` best of
# them. Some layers reuse the choice of the layer before. transformers' code scores and chooses within the rows of a
# batch, so the layer gets samples as rows, as layers with recurrent state do (recurrent_layers.py), and the mask that
# it
# expects. Rows of at most ``index_topk`` tokens choose every key, so their indexer is not run and attention is dense.
#
# The choice has no gradient, in transformers as well: the weights of the indexer are frozen.


INDEXER = "indexer"  # its name in a layer


def choose_keys_within_samples(model: PreTrainedModel) -> None:
    """Make every layer of ``model`` with sparse attention choose keys within a sample, in place."""
    if model_type(model.config.to_dict()) not in SPARSE:
        return
    for module in model.modules():
        if not hasattr(module, INDEXER):
            continue
        module.forward = partial(_in_rows, module.forward, model.config.index_topk)
        if isinstance(module.indexer, nn.Module):  # None in a layer that reuses a choice
            module.indexer.forward = partial(_choose, module.indexer.forward)
            module.indexer.requires_grad_(False)


def _in_rows(
    forward: Callable[..., tuple[Any, ...]],
    topk: int,
    *,
    packed: PackedLayout | None = None,
    **given: Any,
) -> tuple[Any, ...]:
    """Compute a layer on hidden states [1, T, hidden] of packed samples, or [rows, S, hidden] of padded ones.

    Input without a layout is computed unchanged. The result equals the result of transformers' layer; the keys that a
    layer chooses, which a later layer may reuse, are one tensor per group of rows.
    """
    if packed is None:
        return forward(**given)
    hidden_states, positions = given.pop("hidden_states"), given.pop("position_embeddings")
    reused = given.pop("prev_topk_indices", None)
    del given["attention_mask"]
    rows_of = _rows_of(packed, hidden_states)
    out, chosen = torch.zeros_like(hidden_states), []
    for number, (to_cells, from_cells) in enumerate(rows_of):
        if reused is not None:
            given["prev_topk_indices"] = reused[number]
        rows = to_cells(hidden_states)
        computed, _weights, *indices = forward(
            hidden_states=rows,
            position_embeddings=tuple(to_cells(part) for part in positions),
            attention_mask=_causal(rows.shape[1], topk, rows.device),
            packed=PackedLayout((), packed.context, padded=True),
            **given,
        )
        out = from_cells(out, computed)
        chosen += indices
    return (out, None, tuple(chosen)) if chosen else (out, None)


def _rows_of(
    packed: PackedLayout, hidden_states: torch.Tensor
) -> list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    """Return two functions per group of rows: one lays tokens out in it, one puts its results among all results."""
    if packed.padded:
        return [(lambda tokens: tokens.expand(len(hidden_states), -1, -1), lambda _, computed: computed)]
    assert packed.context.size == 1, "validate() refuses ranks that share the sequences of such a model"

    def to_cells(rows: Rows, tokens: torch.Tensor) -> torch.Tensor:
        return rows.of_keys(tokens[0])

    def from_cells(rows: Rows, out: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        return rows.put_from_keys(computed, out[0])[None]

    return [(partial(to_cells, rows), partial(from_cells, rows)) for rows in packed.rows]


def _causal(length: int, topk: int, device: torch.device) -> torch.Tensor:
    """Return which keys a query may choose, bool [1, 1, length, length]; empty if it chooses all of them."""
    size = length if length > topk else 0
    return torch.ones(1, 1, size, size, dtype=torch.bool, device=device).tril()


def _choose(
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    query: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    *given: Any,
    **named: Any,
) -> torch.Tensor:
    """Return the keys that each query chooses, int32 [rows, S, topk]; of no key if it chooses all of them."""
    if attention_mask.numel() == 0:
        return hidden_states.new_empty(*hidden_states.shape[:2], 0, dtype=torch.int32)
    return forward(hidden_states, query, positions, attention_mask, *given, **named)
