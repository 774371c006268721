"""Draw the next token of every row, from random numbers of the row's own seed.

One pass over the logits adds up their exponentials in blocks; the inverse of the cumulative distribution is then
searched in two levels (blocks, then one block). So the vocabulary is read once, and nothing of its size is drawn or
sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from miles.engine.base import SamplingParams

BLOCK = 256  # tokens per first-level block; about the square root of a vocabulary
CACHED_BYTES = 2000 << 10  # of fp32 scores that are in memory at once, on a CPU
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
        candidates: How many of the heaviest tokens to look at first: all that any row's top-k keeps.
        supported: The restricted rows that ask for their support, as positions in ``restricted``.
        supported_rows: The same, as rows.
    """

    temperature: torch.Tensor
    scaled: bool
    greedy: torch.Tensor
    restricted: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    candidates: int
    supported: torch.Tensor
    supported_rows: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> RowSampling:
        """Build the tensors. ``vocab_size`` bounds top-k."""
        limited = [i for i, p in enumerate(rows) if _cuts(p, vocab_size)]
        supported = [at for at, i in enumerate(limited) if rows[i].returns_support]
        top_k = [min(rows[i].top_k, vocab_size) if rows[i].top_k > 0 else vocab_size for i in limited]
        guesses = [NUCLEUS_GUESS if k == vocab_size else k for k in top_k]
        return cls(
            torch.tensor([[p.temperature or 1.0] for p in rows], dtype=torch.float32, device=device),
            any(p.temperature not in (0, 1) for p in rows),
            torch.tensor([i for i, p in enumerate(rows) if p.temperature == 0], dtype=torch.long, device=device),
            torch.tensor(limited, dtype=torch.long, device=device),
            torch.tensor(top_k, dtype=torch.long, device=device),
            torch.tensor([rows[i].top_p for i in limited], dtype=torch.float64, device=device),
            torch.tensor([rows[i].min_p for i in limited], dtype=torch.float32, device=device),
            min(max(guesses, default=0), vocab_size),
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
        log_probs: fp32 [B], under softmax(logits / temperature): over the full vocabulary, before top-k, top-p and
            min-p, or over the support for rows that ask for it. Under the raw logits for greedy rows.
        supports: The support of each restricted row that asks for it: token ids in any order.
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
    peak, block_sums = _block_sums(logits, rows)
    block, within = _invert(block_sums, uniforms)
    tokens = block * BLOCK + _invert(_block_weights(logits, rows, peak, block), within)[0]
    total = block_sums.double().sum(-1)
    supports: dict[int, np.ndarray] = {}
    if len(rows.restricted):
        restricted = _scores(logits[rows.restricted], rows, rows.restricted)
        weights, order = _keep(restricted.sub_(peak[rows.restricted]).exp_(), rows)
        within_order = _invert(weights, uniforms[rows.restricted])[0]
        tokens[rows.restricted] = order.gather(1, within_order[:, None])[:, 0]
        if rows.supported_rows:
            weights, order = weights[rows.supported], order[rows.supported]
            total[rows.restricted[rows.supported]] = weights.double().sum(-1)
            supports = _supports(weights, order, rows.supported_rows)
    if len(rows.greedy):
        tokens[rows.greedy] = logits[rows.greedy].argmax(-1)
    chosen = _scores(logits.gather(1, tokens[:, None]), rows)
    log_probs = (chosen - peak)[:, 0].double() - total.log()
    return Drawn(tokens, log_probs.float(), supports)


def _scores(logits: torch.Tensor, rows: RowSampling, of: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Return logits / temperature in new fp32 memory, for ``logits`` of the rows ``of``."""
    scores = logits.to(torch.float32, copy=True)
    return scores.div_(rows.temperature[of]) if rows.scaled else scores


def _block_sums(logits: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest score [B, 1], and the sums of exp(score - largest) over its blocks; fp32 [B, blocks].

    On a CPU a few rows at once stay in the cache, in memory that is used again: fresh pages for all rows would take
    longer than the arithmetic.
    """
    count, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    at_a_time = max(1, CACHED_BYTES // (4 * blocks * BLOCK)) if logits.device.type == "cpu" else count
    # What lies beyond the vocabulary stays 0, and is never drawn.
    part = torch.zeros(min(count, at_a_time), blocks * BLOCK, dtype=torch.float32, device=logits.device)
    peak = torch.empty(count, 1, dtype=torch.float32, device=logits.device)
    sums = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    for start in range(0, count, at_a_time):
        some = slice(start, min(start + at_a_time, count))
        padded = part[: some.stop - start]
        scores = padded[:, :vocab]
        scores.copy_(logits[some])
        if rows.scaled:
            scores.div_(rows.temperature[some])
        torch.amax(scores, -1, keepdim=True, out=peak[some])
        scores.sub_(peak[some]).exp_()
        torch.sum(padded.view(len(padded), blocks, BLOCK), -1, out=sums[some])
    return peak, sums


def _block_weights(logits: torch.Tensor, rows: RowSampling, peak: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return exp(score - largest) of one block per row, [B, BLOCK]; 0 beyond the vocabulary."""
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    vocab = logits.shape[1]
    scores = _scores(logits.gather(1, tokens.clamp(max=vocab - 1)), rows)
    return scores.sub_(peak).exp_().masked_fill_(tokens >= vocab, 0.0)


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
        Weights, heaviest first and 0 for tokens that are not kept, and the tokens that they belong to; both [rows,
        candidates].
    """
    vocab = weights.shape[-1]
    total = weights.sum(-1, dtype=torch.float64)
    for candidates in (rows.candidates, vocab):
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


def _supports(weights: torch.Tensor, tokens: torch.Tensor, rows: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the tokens of positive weight of each row, in one copy from the device."""
    positive = weights > 0
    counts = positive.sum(-1).tolist()
    flat = tokens[positive].cpu().numpy()
    return dict(zip(rows, np.split(flat, np.cumsum(counts)[:-1]), strict=True))


# End a response as soon as it contains one of the texts of ``--rollout-stop``.


_MARGIN = 4  # tokens before those that may hold a text: a decoder may drop the space of the first


class StopText:
    """Say whether the last token of a response completes one of ``texts``."""

    def __init__(self, texts: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """``decode`` returns the text of tokens, special ones too."""
        self._texts = tuple(texts)
        self._decode = decode
        # A token has at least one byte, so a text of n bytes is in the last n tokens.
        self._tail = _MARGIN + max(len(text.encode("utf-8")) for text in texts)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether ``token_ids`` end a response. Call it after each token: only the end is looked at."""
        text = self._decode(list(token_ids[-self._tail :]))
        return any(stop in text for stop in self._texts)
