"""The support of each response token of a micro-batch, as tensors, and the logits that it excludes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles.types.replay import WHOLE, TokenSets

EXCLUDED = -1e20  # a logit whose exponential is 0; finite, so that 0 times it is 0


@dataclass(frozen=True)
class Support:
    """The sets of R response tokens, on the training device.

    The places of a token's sets in the flat columns are kept on the host, so that no chunk waits for the device.

    Attributes:
        vocab_size: V.
        is_whole: Which tokens have the whole vocabulary, bool [R].
        ids: Ids of the small sets end to end, int64 [n].
        id_rows: The response token of each id, int64 [n].
        id_ends: The end of each token's ids in ``ids``, host int64 [R + 1], from 0.
        bits: The large sets, uint8 [m, ceil(V / 8)].
        bit_rows: The response token of each of them, int64 [m].
        bit_ends: The same for ``bits``, host int64 [R + 1].
    """

    vocab_size: int
    is_whole: torch.Tensor
    ids: torch.Tensor
    id_rows: torch.Tensor
    id_ends: np.ndarray
    bits: torch.Tensor
    bit_rows: torch.Tensor
    bit_ends: np.ndarray

    @classmethod
    def of(cls, sets: TokenSets, device: torch.device) -> Support:
        """Move ``sets`` to ``device``."""
        counts = np.where(sets.is_listed, sets.sizes, 0).astype(np.int64)
        rows = np.arange(len(sets))

        def tensor(values: np.ndarray) -> torch.Tensor:
            host = torch.from_numpy(np.ascontiguousarray(values))
            return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

        return cls(
            vocab_size=sets.vocab_size,
            is_whole=tensor(sets.sizes == WHOLE),
            ids=tensor(sets.ids.astype(np.int64)),
            id_rows=tensor(np.repeat(rows, counts)),
            id_ends=_ends(counts),
            bits=tensor(sets.bits.copy()),
            bit_rows=tensor(np.flatnonzero(sets.is_bits)),
            bit_ends=_ends(sets.is_bits),
        )

    def exclude_(self, logits: torch.Tensor, part: slice, first_token: int = 0) -> torch.Tensor:
        """Set the logits of tokens outside their support to ``EXCLUDED``, in place; returns ``logits``.

        Args:
            logits: [rows, v], of the response tokens ``part``, for v tokens of the vocabulary. Columns beyond V (the
                padding of an embedding) are excluded for every token whose support is not the whole vocabulary.
            part: The response tokens, with a start and a stop.
            first_token: The token of the first column.
        """
        rows, width = logits.shape
        # One more column takes the ids of other ranks' vocabulary: selecting this rank's ids would wait for a GPU.
        mask = self.is_whole[part, None].repeat(1, width + 1)
        of_ids = slice(int(self.id_ends[part.start]), int(self.id_ends[part.start + rows]))
        column = self.ids[of_ids] - first_token
        column = torch.where((column >= 0) & (column < width), column, width)
        mask.index_put_((self.id_rows[of_ids] - part.start, column), torch.ones_like(column, dtype=torch.bool))
        of_bits = slice(int(self.bit_ends[part.start]), int(self.bit_ends[part.start + rows]))
        if of_bits.stop > of_bits.start:
            token = first_token + torch.arange(width, device=logits.device)
            inside = token < 8 * self.bits.shape[1]
            byte = torch.where(inside, token // 8, 0)
            flags = (self.bits[of_bits][:, byte] >> (token % 8).to(torch.uint8)) & inside.to(torch.uint8)
            mask[self.bit_rows[of_bits] - part.start, :width] = flags.bool()
        return logits.masked_fill_(~mask[:, :width], EXCLUDED)


def _ends(counts: np.ndarray) -> np.ndarray:
    ends: np.ndarray = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return ends
