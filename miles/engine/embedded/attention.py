"""The KV cache of the running sequences, and the attention over it, registered with transformers as ``miles_slots``.

The step that a forward pass takes (prefill or decode) travels through the model as the keyword argument ``kv_step``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from miles.models.attention_sinks import with_sink
from miles.models.packing import ROW_STEP

NAME = "miles_slots"  # of the attention implementation, in transformers
MASKED_QUERIES = 1024  # of a prompt that attend at once, if the kernel needs a mask
MANY_ROWS = 8  # from which decoding on a CPU attends by two products, about twice as fast as PyTorch's fused kernel


@dataclass(frozen=True)
class Layer:
    """A layer's attention: its number, and what distinguishes it from plain causal attention.

    A query sees the last ``window`` keys, its own included; None: all. ``sinks`` [heads] are attention sinks
    (models/attention_sinks.py). ``chosen`` [B, T, n] names the only keys that each query may see.
    """

    number: int
    scale: float | None
    window: int | None = None
    sinks: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its attention is plain and causal."""
        return self.window is None and self.sinks is None and self.chosen is None


class KVCache:
    """Hold keys and values in two buffers per layer, ``[rows, kv_heads, width, head_dim]``.

    Values may be narrower than keys, as with latent attention, whose keys and values are stored as attention reads
    them.

    Rows ``0 .. n - 1`` are in use (running_batch.py knows the sequence of each); the tokens of a row start at position
    0. Values beyond a row's length are finite but meaningless: attention masks them out. Buffers are written in place,
    in the model's dtype. Their width grows by doubling, up to the longest sequence that is expected.
    """

    def __init__(self, states: LayerStates | None = None) -> None:
        """``states`` are what some layers keep alongside keys and values, of the same rows."""
        self.states = states
        # By the number of a layer. ``_of_indexer`` gives the number for a layer's indexer, which has no values.
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows = 0
        self._width = 0
        self._longest = 0

    def expect(self, longest: int) -> None:
        """Expect a sequence that will have at most ``longest`` tokens, until the next ``clear``."""
        self._longest = max(self._longest, longest)

    def reserve(self, rows: int, width: int) -> None:
        """Make room for ``rows`` sequences of ``width`` tokens, and keep the stored tokens."""
        if rows <= self._rows and width <= self._width:
            return
        self._rows = max(rows, self._rows)
        if width > self._width:
            doubled = min(2 * self._width, self._longest)
            self._width = -(-max(width, doubled) // ROW_STEP) * ROW_STEP
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._grown(keys), self._grown(values)

    def attended(self, rows: int, width: int) -> int:
        """Return the width that so many rows of ``width`` tokens attend over.

        It is the whole buffers, unless they are much wider: products of parts of them would copy the parts.
        """
        return self._width if rows >= MANY_ROWS and self._width <= 2 * width else width

    def write_prompts(self, layer: int, key: torch.Tensor, value: torch.Tensor, first_row: int) -> None:
        """Store prompts [P, kv_heads, T, D] in row ``first_row`` and those after it."""
        keys, values = self._layer(layer, key, value)
        rows = slice(first_row, first_row + len(key))
        keys[rows, :, : key.shape[2]] = key
        values[rows, :, : key.shape[2]] = value

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
        if self.states is not None:
            self.states.move(source, target)

    def copy_rows(self, sources: Sequence[int], first_row: int, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` to the free rows from ``first_row`` on."""
        rows = torch.tensor(sources)
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[first_row : first_row + len(sources), :, :length] = buffer[rows, :, :length]
        if self.states is not None:
            self.states.copy_rows(rows, first_row)

    def clear(self) -> None:
        """Free the memory."""
        if self.states is not None:
            self.states.clear()
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

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keep the keys and values, and attend within the row; [1, heads, prefix, D]."""
        self.keys[layer.number], self.values[layer.number] = key, value
        return _attend(query, key, value, layer.scale, None)


@dataclass(frozen=True)
class PrefillStep:
    """Run prompts, padded on the right: a causal query never sees the padding.

    They are stored in row ``first_row`` and those after it. With a ``prefix``, the tokens of this pass come after it in
    every prompt.
    """

    cache: KVCache
    first_row: int
    prefix: PrefixStep | None = None

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store the keys and values, and attend within each prompt; [P, heads, T, D]."""
        if self.prefix is not None:
            key, value = _after(self.prefix.keys[layer.number], key), _after(self.prefix.values[layer.number], value)
        self.cache.write_prompts(layer.number, key, value, self.first_row)
        if self.prefix is not None:
            assert layer.is_plain, "a model with such layers runs no prefix"
            new, known = query.shape[2], key.shape[2] - query.shape[2]
            visible = torch.ones(new, known + new, dtype=torch.bool, device=query.device).tril(known)
            return _attend(query, key, value, layer.scale, visible)
        if layer.chosen is not None:
            visible = _chosen(layer.chosen, key.shape[2]).tril()[:, None]
            return _attend(query, key, value, layer.scale, visible)
        return _causal(layer, query, key, value)

    def keep_indexed(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Store the keys [P, T, D] of an indexer, and return them."""
        keys = keys[:, None]
        self.cache.write_prompts(_of_indexer(layer), keys, keys[..., :0], self.first_row)
        return keys[:, 0]

    def mask(self, length: int, device: torch.device) -> torch.Tensor:
        """Return which keys a query may see, bool [1, 1, T, T]."""
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


def _after(prefix: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return each prompt's keys or values [P, kv_heads, T, D] after the prefix's [1, kv_heads, prefix, D]."""
    return torch.cat((prefix.expand(len(new), -1, -1, -1), new), 2)


@dataclass(frozen=True)
class DecodeStep:
    """Run the next token of rows 0 .. B - 1.

    ``positions`` [B] are the positions of these tokens. ``mask`` [B, 1, 1, width] is 0 up to them and -inf after.
    """

    cache: KVCache
    rows: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store the keys and values, and attend over the tokens of each row; [B, heads, 1, D]."""
        width = self.mask.shape[-1]
        keys, values = self.cache.append(layer.number, key, value, self.rows, self.positions, width)
        mask = self.mask
        if layer.window is not None:
            old = torch.arange(width, device=mask.device) <= self.positions[:, None] - layer.window
            mask = mask.masked_fill(old[:, None, None], -torch.inf)
        if layer.chosen is not None:
            mask = mask.masked_fill(~_chosen(layer.chosen, width)[:, None], -torch.inf)
        # Treat the query heads that share a key head as its query positions: keys are read once and never repeated.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        if layer.sinks is None and (len(query) < MANY_ROWS or not (query.is_cpu and keys.is_contiguous())):
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=layer.scale)
        else:
            out = _attend_by_products(layer, grouped, keys, values, mask)
        return out.reshape(len(query), query.shape[1], 1, -1)

    def keep_indexed(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Store the keys [B, 1, D] of an indexer, and return the keys of each row, [B, width, D]."""
        keys = keys[:, None]
        width = self.mask.shape[-1]
        stored, _ = self.cache.append(_of_indexer(layer), keys, keys[..., :0], self.rows, self.positions, width)
        return stored[:, 0]


def _attend_by_products(
    layer: Layer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attend from [B, kv_heads, M, D], over keys and values [B, kv_heads, width, D], by two products; query's shape.

    Scores are rounded to the dtype of the products, as in the trainer (training/packed_attention.py).
    """
    rows = query.shape[:-1]
    query, keys, values = (x.flatten(0, 1) for x in (query, keys, values))
    scores = torch.bmm(query, keys.mT).view(*rows, -1)
    scale = query.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    scores = torch.add(mask.float(), scores, alpha=scale)
    if layer.sinks is not None:  # not with_sink, which would copy the whole cache
        sinks = layer.sinks.float().view(1, rows[1], -1, 1).expand(*rows, 1)
        scores = torch.cat([scores, sinks], -1)
    shares = scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype)
    return torch.bmm(shares.flatten(0, 1), values).view(*rows, -1)


def _of_indexer(layer: int) -> int:
    """Return the number under which the cache keeps the keys of a layer's indexer."""
    return -1 - layer


def _chosen(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return whether ``indices`` [B, T, n] name a key, bool [B, T, keys]."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(-1, indices.long(), True)


def _causal(layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend from each of T tokens to those before it; [P, heads, T, D]. Masks take memory that is linear in T."""
    length = query.shape[2]
    width = value.shape[-1]
    window = layer.window
    if window is not None and window >= length:
        window = None
    if window is None and layer.sinks is None:
        return _attend(query, key, value, layer.scale, None)
    parts = []
    for start in range(0, length, MASKED_QUERIES):
        end = min(start + MASKED_QUERIES, length)
        first = max(0, start - window + 1) if window is not None else 0
        q, k, v = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        place = torch.arange(start, end, device=q.device)[:, None]
        keys = torch.arange(first, end, device=q.device)
        visible = keys <= place
        if window is not None:
            visible &= keys > place - window
        if layer.sinks is not None:
            assert layer.scale is not None
            q, k, v = with_sink(q, k, v, layer.sinks, layer.scale)
            visible = F.pad(visible, (1, 0), value=True)
        parts.append(_attend(q, k, v, layer.scale, visible)[..., :width])
    return torch.cat(parts, 2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, visible: torch.Tensor | None
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    causal = visible is None
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=grouped
    )


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
    indices: torch.Tensor | None = None,
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
        sliding_window: How many keys a query sees, its own included; None for all.
        softcap: Must be None.
        s_aux: Attention sinks, [heads].
        position_bias: Must be None.
        indices: The keys that each query may see, [B, T, n]; None for all.
        _: Unused.

    Returns:
        [B, T, heads, D], and None for the attention weights.

    Raises:
        ValueError: For a layer whose attention has more than these, which would silently be left out.
    """
    features = {"soft-capped logits": softcap, "position bias": position_bias}
    present = [name for name, feature in features.items() if feature is not None]
    number = module.layer_idx
    assert isinstance(number, int)
    if present:
        raise ValueError(
            f"--rollout-engine torch: layer {number} of the model has {' and '.join(present)}, which the embedded "
            "engine does not compute: choose another model with --hf-checkpoint"
        )
    layer = Layer(number, scaling, sliding_window, s_aux, indices)
    return kv_step.attend(layer, query, key, value).transpose(1, 2).contiguous(), None  # some layers call view()


AttentionInterface.register(NAME, slot_attention)


# What layers keep of the running sequences alongside keys and values: recurrent states, and the keys of an indexer.
#
# Transformers' layers ask their cache for both, so this is one of its caches. Keys and values, and an indexer's keys,
# are stored in ``KVCache`` as for every model (attention.py); ``update`` therefore returns its arguments.


def bound_time_steps(model: torch.nn.Module) -> None:
    """Apply the lower bound of a Mamba layer's time steps in decoding too, in place.

    Transformers applies it to several tokens, and leaves it out for a single one (5.19.0,
    ``nemotron_h/modeling_nemotron_h.py``, ``mamba2_selective_state_update``), so a response would not have the
    log-probs of a forward pass. A step is ``softplus(x + bias)``, and x the last columns of the layer's projection:
    that is bounded instead.
    """
    for layer in model.modules():
        lowest, _ = getattr(layer, "time_step_limit", (0.0, 0.0))
        if lowest > 0:
            assert isinstance(layer.in_proj, torch.nn.Module)
            layer.in_proj.register_forward_hook(partial(_bounded, layer, math.log(math.expm1(lowest))))


def _bounded(
    layer: torch.nn.Module, lowest: float, _: torch.nn.Module, __: tuple[Any, ...], projected: torch.Tensor
) -> torch.Tensor:
    bias = layer.dt_bias
    assert isinstance(bias, torch.Tensor)
    rest, steps = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
    return torch.cat([rest, torch.maximum(steps, (lowest - bias).to(steps.dtype))], -1)


class LayerStates(DynamicCache):
    """The states of rows 0 .. n - 1. A decoding step reads and replaces them.

    A prefill has its own cache, whose states ``admit`` then appends. If a layer is recurrent, prompts of one
    prefill must be of equal length: its state after a prompt must not have seen padding.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        """Keep nothing yet."""
        super().__init__(config=config)
        self._config = config
        self.step: PrefillStep | DecodeStep | None = None  # the pass that runs

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of this pass: attention stores them, and reads the earlier ones."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store the indexer's keys [B, T, D] of this pass, and return all that its queries may score, [B, width, D]."""
        assert self.step is not None
        return self.step.keep_indexed(layer_idx, indexer_key_states)

    def fresh(self) -> LayerStates:
        """Return an empty one, for a prefill."""
        return LayerStates(self._config)

    def admit(self, prefilled: LayerStates, first_row: int) -> None:
        """Give row ``first_row`` and those after it the states after the prompts of a prefill."""
        for layer, (present, admitted) in enumerate(zip(self.layers, prefilled.layers, strict=True)):
            if not isinstance(admitted, LinearAttentionCacheLayerMixin):
                continue
            if first_row:
                for (old, number), (new, _) in zip(_states_of(present), _states_of(admitted), strict=True):
                    new[number] = torch.cat([old[number][:first_row], new[number]])
            self.layers[layer] = admitted

    def copy_rows(self, sources: torch.Tensor, first_row: int) -> None:
        """Give row ``first_row`` and those after it the states of rows ``sources``."""
        for layer in self.layers:
            for states, number in _states_of(layer):
                states[number] = torch.cat([states[number][:first_row], states[number][sources]])

    def keep_rows(self, rows: int) -> None:
        """Drop the states of all rows but the first ``rows``."""
        for layer in self.layers:
            for states, number in _states_of(layer):
                states[number] = states[number][:rows]

    def move(self, source: int, target: int) -> None:
        """Copy the states of row ``source`` over the states of row ``target``."""
        for layer in self.layers:
            for states, number in _states_of(layer):
                states[number][target] = states[number][source]

    def clear(self) -> None:
        """Free the memory."""
        self.layers = self.fresh().layers


def _states_of(layer: object) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield each state of a layer, as the dictionary that holds it and its number there; none if it has no states."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for states in (layer.conv_states, layer.recurrent_states):
            yield from ((states, number) for number, state in states.items() if state is not None)
