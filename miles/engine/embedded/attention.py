"""The KV cache of the running sequences, and the attention over it, registered with transformers as ``miles_slots``.

The step that a forward pass takes (prefill or decode) travels through the model as the keyword argument ``kv_step``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from miles.model_families.cache_size import ROW_STEP

NAME = "miles_slots"  # of the attention implementation, in transformers


class KVCache:
    """Hold keys and values in two buffers per layer, ``[rows, kv_heads, width, head_dim]``.

    Values may be narrower than keys, as with latent attention, whose keys and values are stored as attention reads
    them.

    Rows ``0 .. n - 1`` belong to the n running sequences, in their order; the tokens of a row start at position 0.
    Values beyond a row's length are finite but meaningless: attention masks them out. Buffers are written in place, in
    the model's dtype. Their width grows by doubling, up to the longest sequence that is expected.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows = 0
        self._width = 0
        self._longest = 0

    @property
    def num_layers(self) -> int:
        """The number of layers that have been written to."""
        return len(self._layers)

    def expect(self, longest: int) -> None:
        """Expect a sequence that will have at most ``longest`` tokens, until the next ``clear``."""
        self._longest = max(self._longest, longest)

    def reserve(self, rows: int, width: int) -> None:
        """Make room for ``rows`` sequences of ``width`` tokens, and keep what is stored."""
        if rows <= self._rows and width <= self._width:
            return
        if rows > self._rows:
            self._rows = rows
        if width > self._width:
            doubled = min(2 * self._width, self._longest)
            self._width = -(-max(width, doubled) // ROW_STEP) * ROW_STEP
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._grown(keys), self._grown(values)

    def write_prompts(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, prompt_of_row: torch.Tensor, first_row: int
    ) -> None:
        """Store prompts [P, kv_heads, T, D]: prompt ``prompt_of_row[i]`` goes to row ``first_row + i``."""
        keys, values = self._layer(layer, key, value)
        rows = slice(first_row, first_row + len(prompt_of_row))
        keys[rows, :, : key.shape[2]] = key[prompt_of_row]
        values[rows, :, : key.shape[2]] = value[prompt_of_row]

    def append(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token per row: ``key``, ``value`` [B, kv_heads, 1, D] of rows 0 .. B - 1 at ``positions`` [B].

        Returns:
            Views of the keys and values of these rows, [B, kv_heads, width, D].
        """
        keys, values = self._layer(layer, key, value)
        keys[rows, :, positions] = key[:, :, 0]
        values[rows, :, positions] = value[:, :, 0]
        n = len(rows)
        return keys[:n, :, :width], values[:n, :, :width]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of row ``source`` over row ``target``."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self._rows = self._width = self._longest = 0

    def _layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers of a layer. New ones are zeros, because a masked NaN is still a NaN."""
        if layer not in self._layers:
            self._layers[layer] = self._zeros(key), self._zeros(value)
        return self._layers[layer]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._width, like.shape[3])

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._zeros(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class PrefixStep:
    """Run the tokens that all prompts of the next prefill start with, as one row, and keep their keys and values."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}  # by layer, [1, kv_heads, prefix, D]
        self.values: dict[int, torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Keep the keys and values, and attend within the row; [1, heads, prefix, D]."""
        self.keys[layer], self.values[layer] = key, value
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


@dataclass(frozen=True)
class PrefillStep:
    """Run prompts, padded on the right: a causal query never sees the padding.

    ``prompt_of_row`` [R] says which prompt of this pass is stored in row ``first_row + i``, for each of R new rows.
    With a ``prefix``, the tokens of this pass come after it in every prompt; ``mask`` [T, prefix + T] is then 0 where
    a query may look and -inf elsewhere.
    """

    cache: KVCache
    prompt_of_row: torch.Tensor
    first_row: int
    prefix: PrefixStep | None = None
    mask: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store the keys and values, and attend within each prompt; [P, heads, T, D]."""
        if self.prefix is not None:
            key, value = _after(self.prefix.keys[layer], key), _after(self.prefix.values[layer], value)
        self.cache.write_prompts(layer, key, value, self.prompt_of_row, self.first_row)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask, is_causal=self.mask is None, scale=scale, enable_gqa=grouped
        )


def _after(prefix: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return each prompt's keys or values [P, kv_heads, T, D] after those of the prefix [1, kv_heads, prefix, D]."""
    return torch.cat((prefix.expand(len(own), -1, -1, -1), own), 2)


@dataclass(frozen=True)
class DecodeStep:
    """Run the next token of rows 0 .. B - 1.

    ``positions`` [B] are the positions of these tokens. ``mask`` [B, 1, 1, width] is 0 up to them and -inf after.
    """

    cache: KVCache
    rows: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store the keys and values, and attend over the tokens of each row; [B, heads, 1, D]."""
        width = self.mask.shape[-1]
        keys, values = self.cache.append(layer, key, value, self.rows, self.positions, width)
        # Treat the query heads that share a key head as its query positions: keys are read once and never repeated.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scale)
        return out.reshape(len(query), query.shape[1], 1, -1)


Step = PrefixStep | PrefillStep | DecodeStep


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_step: Step,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend over the cache, for one layer; transformers calls this.

    Args:
        module: The attention module of the layer.
        query: [B, heads, T, D], of this pass's tokens.
        key: [B, kv_heads, T, D].
        value: [B, kv_heads, T, D].
        attention_mask: Unused.
        kv_step: The step of this pass.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        dropout: Unused.
        sliding_window: Must be None, like ``softcap``, ``s_aux`` and ``position_bias``.
        softcap: Must be None.
        s_aux: Must be None.
        position_bias: Must be None.
        _: Unused.

    Returns:
        [B, T, heads, D], and None for the attention weights.

    Raises:
        ValueError: For a layer that is not plain full attention: it would silently be computed wrongly.
    """
    features = {
        "sliding window": sliding_window,
        "soft-capped logits": softcap,
        "attention sinks": s_aux,
        "position bias": position_bias,
    }
    present = [name for name, value_ in features.items() if value_ is not None]
    if present:
        raise ValueError(
            f"--rollout-engine torch: layer {module.layer_idx} of the model has {' and '.join(present)}; the embedded "
            "engine runs decoder-only models with plain full attention: choose one with --hf-checkpoint"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    return kv_step.attend(layer, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, slot_attention)
