"""Keys and values of the running sequences: one row a sequence, its tokens from position 0 on, in the model's dtype."""

from __future__ import annotations

import torch

WIDTH_STEP = 64  # row lengths grow in steps of this, so that buffers are seldom reallocated


class KVCache:
    """One buffer a layer, ``[2 (key, value), rows, kv_heads, width, head_dim]``, written in place, grown by doubling.

    Rows ``0 .. n - 1`` belong to the running sequences, in their order. What stands behind a row's length is finite
    but meaningless: attention masks it out.
    """

    def __init__(self) -> None:
        self._layers: dict[int, torch.Tensor] = {}
        self._rows = 0
        self._width = 0

    @property
    def num_layers(self) -> int:
        """Layers that have been written to."""
        return len(self._layers)

    def reserve(self, rows: int, width: int) -> None:
        """Make room for ``rows`` sequences of ``width`` tokens. What is stored is kept."""
        if rows <= self._rows and width <= self._width:
            return
        if rows > self._rows:
            self._rows = rows
        if width > self._width:
            self._width = -(-max(width, 2 * self._width) // WIDTH_STEP) * WIDTH_STEP
        for layer, old in self._layers.items():
            self._layers[layer] = new = old.new_zeros(2, self._rows, old.shape[2], self._width, old.shape[4])
            new[:, : old.shape[1], :, : old.shape[3]] = old

    def write_prompts(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, prompt_of_row: torch.Tensor, first_row: int
    ) -> None:
        """Store prompts [P, kv_heads, T, D]: number ``prompt_of_row[i]`` goes to row ``first_row + i``."""
        buffer = self._layer(layer, key)
        rows = slice(first_row, first_row + len(prompt_of_row))
        buffer[0, rows, :, : key.shape[2]] = key[prompt_of_row]
        buffer[1, rows, :, : key.shape[2]] = value[prompt_of_row]

    def append(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one token ``key``, ``value`` [B, kv_heads, 1, D] of rows 0 .. B - 1 at ``positions`` [B].

        Returns views of the keys and values of these rows, [B, kv_heads, width, D].
        """
        keys, values = self._layer(layer, key)
        keys[rows, :, positions] = key[:, :, 0]
        values[rows, :, positions] = value[:, :, 0]
        n = len(rows)
        return keys[:n, :, :width], values[:n, :, :width]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of row ``source`` over row ``target``."""
        for buffer in self._layers.values():
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def clear(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        self._rows = self._width = 0

    def _layer(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """The buffer of a layer. New ones are zeros, as a masked NaN is still a NaN."""
        if layer not in self._layers:
            self._layers[layer] = like.new_zeros(2, self._rows, like.shape[1], self._width, like.shape[3])
        return self._layers[layer]
