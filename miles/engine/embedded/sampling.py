"""Draw the next token of every row, from random numbers of the row's own seed.

One pass over the logits exponentiates them; the inverse of the cumulative distribution is then searched in two levels
(blocks, then one block). So the vocabulary is read a few times, and nothing of its size is drawn or sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from miles.engine.base import SamplingParams

BLOCK = 256  # tokens per first-level block; about the square root of a vocabulary
NUCLEUS_GUESS = 1024  # look for a top-p set among so many tokens before sorting the whole vocabulary


def seeded_uniforms(seed: int, count: int) -> np.ndarray:
    """Return ``count`` float64 numbers in [0, 1) from ``seed`` (0 .. 2**128 - 1), by NumPy's Philox: one per token."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


@dataclass(frozen=True)
class RowSampling:
    """Hold the sampling parameters of B rows as tensors, built once for as long as the rows stay the same.

    Attributes:
        temperature: [B, 1] fp32; 1 for greedy rows.
        scaled: Whether any temperature differs from 1.
        greedy: The greedy rows.
        restricted: The rows with a top-k, top-p or min-p.
        top_k: The limits of the restricted rows.
        top_p: The limits of the restricted rows.
        min_p: The limits of the restricted rows.
        supported: Those of the restricted rows whose kept tokens are asked for, as positions in ``restricted``.
        supported_rows: The same, as rows.
    """

    temperature: torch.Tensor
    scaled: bool
    greedy: torch.Tensor
    restricted: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    supported: torch.Tensor
    supported_rows: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> RowSampling:
        """Build the tensors. ``vocab_size`` bounds top-k."""
        limited = [i for i, p in enumerate(rows) if _cuts(p, vocab_size)]
        supported = [at for at, i in enumerate(limited) if rows[i].returns_support]
        top_k = [min(rows[i].top_k, vocab_size) if rows[i].top_k > 0 else vocab_size for i in limited]
        return cls(
            torch.tensor([[p.temperature or 1.0] for p in rows], dtype=torch.float32, device=device),
            any(p.temperature not in (0, 1) for p in rows),
            torch.tensor([i for i, p in enumerate(rows) if p.temperature == 0], dtype=torch.long, device=device),
            torch.tensor(limited, dtype=torch.long, device=device),
            torch.tensor(top_k, dtype=torch.long, device=device),
            torch.tensor([rows[i].top_p for i in limited], dtype=torch.float64, device=device),
            torch.tensor([rows[i].min_p for i in limited], dtype=torch.float32, device=device),
            torch.tensor(supported, dtype=torch.long, device=device),
            tuple(limited[at] for at in supported),
        )


def _cuts(sampling: SamplingParams, vocab_size: int) -> bool:
    """Return whether some tokens are never drawn."""
    limits = sampling.top_p < 1 or 0 < sampling.top_k < vocab_size or sampling.min_p > 0
    return sampling.temperature > 0 and limits


class Drawn(NamedTuple):
    """One token per row.

    Attributes:
        tokens: int64 [B].
        log_probs: fp32 [B], under softmax(logits / temperature) over the full vocabulary, before top-k, top-p and
            min-p; over what these have kept for rows that ask for it; under the raw logits for greedy rows.
        supports: What they have kept, token ids in no order, for each row that asks for it and is cut.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    supports: dict[int, np.ndarray]


def sample(logits: torch.Tensor, rows: RowSampling, uniforms: torch.Tensor) -> Drawn:
    """Draw one token per row. A row's token depends on that row alone.

    Args:
        logits: [B, V].
        rows: The sampling parameters.
        uniforms: [B] float64 in [0, 1).
    """
    scores = logits.float()
    if rows.scaled:
        scores = scores / rows.temperature
    peak = scores.amax(-1, keepdim=True)
    weights = _padded_exp(scores, peak)
    blocks = weights.view(len(weights), -1, BLOCK)
    block_sums = blocks.sum(-1)
    block, within = _invert(block_sums, uniforms)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]
    tokens = block * BLOCK + _invert(inside, within)[0]
    total = block_sums.double().sum(-1)
    supports: dict[int, np.ndarray] = {}
    if len(rows.restricted):
        kept, order = _keep(weights[rows.restricted], rows)
        within_kept = _invert(kept, uniforms[rows.restricted])[0]
        tokens[rows.restricted] = order.gather(1, within_kept[:, None])[:, 0]
        if rows.supported_rows:
            kept, order = kept[rows.supported], order[rows.supported]
            total[rows.restricted[rows.supported]] = kept.double().sum(-1)
            supports = _supports(kept, order, rows.supported_rows)
    if len(rows.greedy):
        tokens[rows.greedy] = scores[rows.greedy].argmax(-1)
    log_probs = (scores.gather(1, tokens[:, None]) - peak)[:, 0].double() - total.log()
    return Drawn(tokens, log_probs.float(), supports)


def _padded_exp(scores: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - peak), padded with zeros to a whole number of blocks."""
    shifted = scores - peak
    padding = -shifted.shape[-1] % BLOCK
    if padding:
        shifted = F.pad(shifted, (0, padding), value=float("-inf"))
    return shifted.exp_()


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the cumulative distribution of unnormalized ``weights`` [B, N] at ``uniforms`` [B].

    Sums are float64. An index of weight 0 is never drawn, whatever the rounding.

    Returns:
        The index [B] that each uniform falls on, and its position within that index's weight, from 0 to 1.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniforms[:, None] * total
    drawn = (cumulative <= target).sum(-1, keepdim=True)
    index = torch.minimum(drawn, (cumulative < total).sum(-1, keepdim=True))
    weight = weights.gather(1, index).double()
    within = (target - (cumulative.gather(1, index) - weight)) / weight
    return index[:, 0], within.clamp(0, 1)[:, 0]


def _keep(weights: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep each row's ``top_k`` heaviest tokens, of these the fewest that hold ``top_p`` of the mass, then ``min_p``.

    Returns:
        Weights, heaviest first and 0 for what is not kept, and the tokens that they belong to; both [rows, candidates].
    """
    vocab = weights.shape[-1]
    guess = int(rows.top_k.max()) if int(rows.top_k.max()) < vocab else NUCLEUS_GUESS
    total = weights.sum(-1, dtype=torch.float64)
    for candidates in (min(guess, vocab), vocab):
        heaviest, tokens = weights.topk(candidates)
        lightest = heaviest[:, -1]
        rank = torch.arange(candidates, device=weights.device)
        heaviest = heaviest.masked_fill(rank >= rows.top_k[:, None], 0.0)
        cumulative = heaviest.cumsum(-1, dtype=torch.float64)
        # top_p is a share of this mass: what top-k left, or everything.
        mass = torch.where(rows.top_k <= candidates, cumulative[:, -1], total)
        bound = rows.min_p * heaviest[:, 0]
        if bool(((cumulative[:, -1] >= rows.top_p * mass) | (lightest < bound)).all()):
            break
    before = cumulative - heaviest
    cut = (before >= (rows.top_p * mass)[:, None]) | (heaviest < bound[:, None])
    return heaviest.masked_fill(cut, 0.0), tokens


def _supports(kept: torch.Tensor, tokens: torch.Tensor, rows: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the tokens of positive weight of each row, in one copy from the device."""
    positive = kept > 0
    counts = positive.sum(-1).tolist()
    flat = tokens[positive].cpu().numpy()
    return dict(zip(rows, np.split(flat, np.cumsum(counts)[:-1]), strict=True))
