"""Sparse attention (deepseek_v32, glm_moe_dsa) on packed or padded samples: each sample chooses among its own keys.

In such a layer an indexer scores the keys that a query may see, and the query attends to the ``index_topk`` best of
them. Some layers reuse the choice of the layer before. transformers' code scores and chooses within the rows of a
batch, so the layer gets samples as rows, as layers with recurrent state do (recurrent_layers.py), and the mask that it
expects. Rows of at most ``index_topk`` tokens choose every key, so their indexer is not run and attention is dense.

The choice has no gradient, in transformers as well: the weights of the indexer are frozen.
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

    What comes without a layout is computed as it is. The result is that of transformers' layer; the keys that a layer
    chooses, which a later layer may reuse, are one tensor per group of rows.
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
    """Return, for each group of rows, what lays tokens out in it, and what puts its results among those of all."""
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
