"""Pack samples of known length into few micro-batches of a token budget."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedSamples:
    """The facts of samples that packing needs, as int64 columns [samples].

    Attributes:
        prompt: Which prompt a sample has. Samples of one prompt may share its tokens.
        prompt_length: Tokens of the prompt.
        response: Tokens of the response.
    """

    prompt: np.ndarray
    prompt_length: np.ndarray
    response: np.ndarray


def pack_shares(samples: PackedSamples, shares: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
    """Return bins of at most ``budget`` packed tokens for each share, by first-fit decreasing (Johnson, 1973).

    A prompt that is in a bin already costs nothing there, so samples of one prompt are taken one after another and
    prefer the bin of their prompt. A sample longer than the budget gets a bin of its own. Ties are broken by the
    numbers of prompts, then by the place in the share.

    Args:
        samples: All samples.
        shares: The samples of each share, as indices into ``samples``; so are those in the bins.
        budget: Packed tokens per bin.

    >>> group = PackedSamples(np.zeros(4, int), np.full(4, 30), np.full(4, 10))  # one prompt
    >>> pack_shares(group, [range(4)], 70), pack_shares(group, [range(4)], 60)
    ([[[0, 1, 2, 3]]], [[[0, 1, 2], [3]]])
    """
    sizes = np.array([len(share) for share in shares], np.int64)
    index = np.fromiter((i for share in shares for i in share), np.int64, int(sizes.sum()))
    share = np.repeat(np.arange(len(shares)), sizes)
    prompt, response = samples.prompt[index], samples.response[index]
    length = samples.prompt_length[index] + response
    longest = _largest_of_prompt(share, prompt, length)
    order = np.lexsort((-length, prompt, -longest, share))  # stable: ties keep their order
    ends = np.cumsum(sizes)
    taken = list(zip(*(column[order].tolist() for column in (index, prompt, length, response)), strict=True))
    cuts = [0, *ends.tolist()]
    return [_first_fit(taken[begin:end], budget) for begin, end in zip(cuts, cuts[1:], strict=False)]


def _largest_of_prompt(share: np.ndarray, prompt: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return for each sample the length of the longest of its prompt and share."""
    if not len(length):
        return length
    order = np.lexsort((prompt, share))
    begins = np.flatnonzero(np.diff(prompt[order], prepend=-1) | np.diff(share[order], prepend=-1))
    largest = np.empty_like(length)
    largest[order] = np.repeat(np.maximum.reduceat(length[order], begins), np.diff(begins, append=len(length)))
    return largest


def _first_fit(samples: Sequence[tuple[int, int, int, int]], budget: int) -> list[list[int]]:
    """Put (index, prompt, length, response) into bins, in order; the samples of a prompt are adjacent.

    The cheapest bin is the one that has the prompt; of equal ones it is the first.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    least = min((length for _, _, length, _ in samples), default=0)
    open_bins: list[int] = []  # into which at least the shortest sample would fit
    holding: list[int] = []  # bins that have the prompt, in order
    current = None
    for index, prompt, length, response in samples:
        if prompt != current:
            current, holding = prompt, []
        chosen, cost = -1, response
        if response < length:
            for number in holding:
                if room[number] >= response:
                    chosen = number
                    break
        if chosen < 0:
            cost = length
            for number in open_bins:
                if room[number] >= length:
                    chosen = number
                    break
            else:
                chosen = len(bins)
                bins.append([])
                room.append(budget)
                open_bins.append(chosen)
            insort(holding, chosen)
        bins[chosen].append(index)
        room[chosen] -= cost
        if room[chosen] < least and chosen in open_bins:
            open_bins.remove(chosen)
    return bins


def rows_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of ``lengths`` in bins of at most ``budget`` tokens, each padded to the longest of its bin.

    The longest come first, so that similar lengths share a bin. A sample longer than the budget gets a bin of its own.

    >>> rows_by_budget([10, 40, 38, 12, 9], 80)
    [[1, 2], [3, 0, 4]]
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > budget:
            bins.append([])
        bins[-1].append(index)
    return bins
