"""What an engine chose and the trainer repeats: the support of truncated sampling, and the experts of each token.

The support is the set of tokens that a token of a response was drawn from. A set is stored as sorted ids, 4 bytes each,
or as one bit per token of the vocabulary if that is smaller. So a token costs at most V / 8 bytes, and a set of 20
tokens 80. The whole vocabulary costs nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WHOLE = -1  # the size that stands for the whole vocabulary


@dataclass(frozen=True, eq=False)
class TokenSets:
    """One set of token ids per response token.

    Attributes:
        vocab_size: V, the tokens of the vocabulary.
        sizes: The number of tokens of each set, int32 [N]; ``WHOLE`` if it is the vocabulary.
        ids: The sets of at most V / 32 tokens end to end, each ascending, uint32.
        bits: The larger ones, uint8 [M, ceil(V / 8)]: token t is bit t % 8 of byte t // 8.

    >>> sets = TokenSets.of(64, [[3], None, [5, 2]])
    >>> sets.sizes.tolist(), [None if s is None else s.tolist() for s in sets.sets()]
    ([1, -1, 2], [[3], None, [2, 5]])
    """

    vocab_size: int
    sizes: np.ndarray
    ids: np.ndarray
    bits: np.ndarray

    @classmethod
    def of(cls, vocab_size: int, sets: Iterable[Sequence[int] | np.ndarray | None]) -> TokenSets:
        """Build them from ids in any order; None is the whole vocabulary."""
        builder = TokenSetsBuilder(vocab_size)
        for one in sets:
            builder.add(one)
        return builder.build()

    @classmethod
    def whole(cls, vocab_size: int, count: int) -> TokenSets:
        """Return ``count`` whole vocabularies: tokens that nothing was cut off for."""
        width = -(-vocab_size // 8)
        sizes = np.full(count, WHOLE, np.int32)
        return cls(vocab_size, sizes, np.zeros(0, np.uint32), np.zeros((0, width), np.uint8))

    @classmethod
    def joined(cls, parts: Sequence[TokenSets]) -> TokenSets:
        """Return the sets of all parts, of one vocabulary, in order."""
        vocab_size = parts[0].vocab_size
        assert all(part.vocab_size == vocab_size for part in parts), "sets of several vocabularies"
        columns = ([getattr(part, name) for part in parts] for name in ("sizes", "ids", "bits"))
        return cls(vocab_size, *(np.concatenate(column) for column in columns))

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSets):
            return NotImplemented
        same = (np.array_equal(getattr(self, name), getattr(other, name)) for name in ("sizes", "ids", "bits"))
        return self.vocab_size == other.vocab_size and all(same)

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_listed(self) -> np.ndarray:
        """Which sets are stored as ids, bool [N]."""
        listed: np.ndarray = (self.sizes != WHOLE) & (self.sizes.astype(np.int64) * 32 <= self.vocab_size)
        return listed

    @property
    def is_bits(self) -> np.ndarray:
        """Which sets are stored as bits, bool [N]."""
        in_bits: np.ndarray = (self.sizes != WHOLE) & ~self.is_listed
        return in_bits

    def take(self, indices: np.ndarray) -> TokenSets:
        """Return the sets at ``indices``, int64 [R], in this order."""
        listed = self.is_listed
        counts = np.where(listed, self.sizes, 0).astype(np.int64)
        starts = np.cumsum(counts) - counts
        taken = counts[indices]
        within = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        row_of = np.cumsum(self.is_bits) - 1
        chosen = indices[self.is_bits[indices]]
        ids = self.ids[np.repeat(starts[indices], taken) + within]
        return TokenSets(self.vocab_size, self.sizes[indices], ids, self.bits[row_of[chosen]])

    def contain(self, tokens: Sequence[int]) -> np.ndarray:
        """Return for each set whether it has the token alongside it, bool [N]; those outside V are in no set."""
        wanted = np.asarray(tokens, np.int64)
        inside = (wanted >= 0) & (wanted < self.vocab_size)
        wanted = np.where(inside, wanted, 0)
        mask: np.ndarray = self.sizes == WHOLE
        listed, in_bits = np.flatnonzero(self.is_listed), np.flatnonzero(self.is_bits)
        row = np.repeat(listed, self.sizes[listed])
        mask[row[self.ids == wanted[row]]] = True
        of_bits = wanted[in_bits]
        mask[in_bits] = self.bits[np.arange(len(in_bits)), of_bits // 8] >> (of_bits % 8) & 1
        return mask & inside

    def sets(self) -> list[np.ndarray | None]:
        """Return the ids of each set, ascending, int64; None for the whole vocabulary."""
        sets: list[np.ndarray | None] = []
        start, row = 0, 0
        for size, listed in zip(self.sizes.tolist(), self.is_listed.tolist(), strict=True):
            if size == WHOLE:
                sets.append(None)
            elif listed:
                sets.append(self.ids[start : start + size].astype(np.int64))
                start += size
            else:
                sets.append(np.flatnonzero(np.unpackbits(self.bits[row], bitorder="little")))
                row += 1
        return sets

    def check(self) -> None:
        """Raise ``ValueError`` unless the columns belong to each other and every id is in the vocabulary."""
        listed, in_bits = self.is_listed, self.is_bits
        if (self.sizes[self.sizes != WHOLE] < 1).any() or (self.sizes > self.vocab_size).any():
            raise ValueError("a set is empty, or larger than the vocabulary")
        if int(self.sizes[listed].sum()) != len(self.ids) or int(in_bits.sum()) != len(self.bits):
            raise ValueError("the sizes of the sets do not fit their ids and bits")
        if (self.ids >= self.vocab_size).any():
            raise ValueError(f"a set has a token outside the vocabulary of {self.vocab_size}")
        row = np.repeat(np.flatnonzero(listed), self.sizes[listed])
        if (np.diff(self.ids.astype(np.int64))[np.diff(row) == 0] <= 0).any():
            raise ValueError("the ids of a set are not ascending")
        flags = np.unpackbits(self.bits, axis=1, bitorder="little")
        if flags[:, self.vocab_size :].any() or (flags.sum(1) != self.sizes[in_bits]).any():
            raise ValueError("the bits of a set are not as many as its size")


class TokenSetsBuilder:
    """Collects sets one by one; in memory they are as small as in ``TokenSets``."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._sizes = array("i")
        self._ids = array("I")
        self._bits = bytearray()

    def add(self, ids: Sequence[int] | np.ndarray | None) -> None:
        """Add a set, given in any order; None is the whole vocabulary."""
        if ids is None or len(ids) == self.vocab_size:
            self._sizes.append(WHOLE)
            return
        sorted_ids = np.sort(np.asarray(ids, np.uint32))
        self._sizes.append(len(sorted_ids))
        if len(sorted_ids) * 32 <= self.vocab_size:
            self._ids.frombytes(sorted_ids.tobytes())
            return
        flags = np.zeros(self.vocab_size, np.uint8)
        flags[sorted_ids] = 1
        self._bits += np.packbits(flags, bitorder="little").tobytes()

    def build(self) -> TokenSets:
        """Return what was added."""
        bits = np.frombuffer(bytes(self._bits), np.uint8).reshape(-1, -(-self.vocab_size // 8))
        sizes, ids = np.array(self._sizes, np.int32), np.array(self._ids, np.uint32)
        return TokenSets(self.vocab_size, sizes, ids, bits)


def extended(
    before: TokenSets | None, tokens_before: int, more: TokenSets | None, more_tokens: int
) -> TokenSets | None:
    """Return the sets of a response of ``tokens_before`` tokens that grows by ``more_tokens``.

    Tokens without sets, such as a tool's tokens, have the whole vocabulary. None if neither part has sets.
    """
    known = before if before is not None else more
    if known is None:
        return None
    first = TokenSets.whole(known.vocab_size, tokens_before) if before is None else before
    second = TokenSets.whole(known.vocab_size, more_tokens) if more is None else more
    return TokenSets.joined([first, second])


# The experts that the routers of a model chose for each token: routing replay.
#
# An array of ``[positions, layers, k]`` holds, for the positions of a sample from its first token on, the k experts of
# each decoder layer; a layer without experts has zeros. The last token of a sample is generated and not read, so it
# has none. That is one byte per token, layer and choice up to 256 experts, and two beyond: 48 layers of 8 choices take
# 384 bytes per token.


UNKNOWN = -1  # in a micro-batch: the router chooses on its own


def dtype_for(num_experts: int) -> type[np.generic]:
    """Return the smallest dtype that holds the number of every expert."""
    return np.uint8 if num_experts <= 256 else np.int16


def continued(first: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """Return the choices of a sample that was continued. ``more`` has the choices of all its positions, computed again.

    A position keeps the choice that was made when it was generated.
    """
    if first is None or more is None:
        return more if first is None else first
    return np.concatenate([first, more[len(first) :]])


def at_tokens(choices: list[np.ndarray], sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the choices of the tokens of a micro-batch, int16 [T, layers, k], ``UNKNOWN`` for tokens without choices.

    Args:
        choices: The choices of each sample; one sample or more.
        sample: The sample of each token, int64 [T]; -1 for padding.
        position: Its position in the sample, int64 [T].
    """
    result = np.full((len(sample), *choices[0].shape[1:]), UNKNOWN, np.int16)
    for number, of_sample in enumerate(choices):
        held = np.flatnonzero((sample == number) & (position < len(of_sample)))
        result[held] = of_sample[position[held]]
    return result
