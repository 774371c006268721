"""What layers keep of the running sequences beside keys and values: recurrent states, and the keys of an indexer.

Transformers' layers ask their cache for both, so this is one of its caches. Keys and values, and an indexer's keys, are
stored in ``KVCache`` as for every model (attention.py); ``update`` therefore returns what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from miles.engine.embedded.attention import DecodeStep, PrefillStep


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

    A prefill has a cache of its own, whose states ``admit`` then appends. If a layer is recurrent, prompts of one
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
        """Return the keys and values of this pass: attention stores them, and reads those of earlier passes."""
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
        for layer, (mine, theirs) in enumerate(zip(self.layers, prefilled.layers, strict=True)):
            if not isinstance(theirs, LinearAttentionCacheLayerMixin):
                continue
            if first_row:
                for (old, number), (new, _) in zip(_states_of(mine), _states_of(theirs), strict=True):
                    new[number] = torch.cat([old[number][:first_row], new[number]])
            self.layers[layer] = theirs

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
        """Copy the states of row ``source`` over those of row ``target``."""
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
