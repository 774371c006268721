"""The images that a model reads: as files, as tensors for the model's vision tower, and in a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.types.sample import data_uri

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, in the order of their placeholders. All samples of a group share the object.

    A trajectory of several turns has another object in each turn that brings images.

    Attributes:
        files: Each encoded image (PNG, JPEG, …).
        sizes: Width and height to which each is resized before the model's processor reads it.
        counts: How many tokens each takes.
        starts: The position of the first of them in the sample's tokens.
        placeholder_id: The token that they are.
        model: The folder or name that the processor is loaded from.
        where: The location of the row, for messages.
        cache: What was computed of the images in this process (``models.images``).
    """

    files: tuple[bytes, ...]
    sizes: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    placeholder_id: int
    model: str
    where: str = field(default="", compare=False)
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process can compute."""
        return self.__dict__ | {"cache": {}}

    def after(self, earlier: PromptImages | None, tokens: int) -> PromptImages:
        """Return the images ``earlier``, then these: those of a turn that comes after ``tokens`` tokens."""
        moved = replace(self, starts=tuple(tokens + start for start in self.starts), cache={})
        if earlier is None:
            return moved
        names = ("files", "sizes", "counts", "starts")
        both: dict[str, Any] = {name: (*getattr(earlier, name), *getattr(moved, name)) for name in names}
        return replace(earlier, cache={}, **both)

    def uris(self) -> list[str]:
        """Return the images as ``data:`` URIs: PNG, as ``models.images.encoded`` makes them. A group shares them."""
        if "uris" not in self.cache:
            self.cache["uris"] = [data_uri("image/png", file) for file in self.files]
        uris: list[str] = self.cache["uris"]
        return uris

    def unexpanded(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens with one placeholder per image, as servers that process images themselves take them."""
        is_sent = np.ones(len(token_ids), bool)
        is_sent[_places(self.starts, self.counts)] = False
        is_sent[list(self.starts)] = True
        sent: list[int] = np.asarray(token_ids)[is_sent].tolist()
        return sent


def _places(starts: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    ranges = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(ranges) if ranges else np.arange(0)


@dataclass(frozen=True, eq=False)
class ImageTensors:
    """The images of one prompt as the model's processor makes them, shared by all samples of a group.

    Attributes:
        tensors: The processor's, by the names of the model's arguments, with the images along the first axis.
        counts: How many tokens each image takes.
        starts: The position of the first of them in the sample's tokens.
        placeholder_id: The token that they are.
        grids: For models with 3-D rotary positions: the temporal, vertical and horizontal positions that the tokens of
            each image take, int64 [images, 3]. None for other models.
    """

    tensors: Mapping[str, np.ndarray]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    placeholder_id: int
    grids: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The memory that the tensors take."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def offset(self) -> int:
        """How far rotary positions behind the images are from the indices of the tokens."""
        return 0 if self.grids is None else int(self.grids[:, 1:].max(1).sum()) - sum(self.counts)

    def places(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the positions of the images' tokens in a sample, int64 [sum of counts].

        Other placeholders were sampled, and are text.

        Raises:
            ValueError: The sample has other tokens there, or the images have other features.
        """
        if self.grids is not None and (self.grids.prod(1) != self.counts).any():
            raise ValueError(
                f"images take {sum(self.counts)} tokens, and their grids have {self.grids.prod(1).sum()} features"
            )
        indices = _places(self.starts, self.counts)
        right = (token_ids[indices[indices < len(token_ids)]] == self.placeholder_id).sum()
        if right != len(indices):
            raise ValueError(
                f"a sample has {right} placeholders where its images take {len(indices)} tokens; functions of your own "
                "must keep the prompt's tokens"
            )
        return indices

    def positions(self, token_ids: np.ndarray) -> np.ndarray | None:
        """Return the rotary positions of a sample's tokens, int64 [3, tokens]; None for a model with one axis.

        Text advances all three axes together. An image begins where the text before it ends; its tokens count along
        the axes of its grid, and the text behind it continues after the longest side.
        """
        if self.grids is None:
            return None
        positions = np.tile(np.arange(len(token_ids)), (3, 1))
        for start, count, grid in zip(self.starts, self.counts, self.grids.tolist(), strict=True):
            first = positions[0, start]
            positions[:, start : start + count] = first + np.indices(grid).reshape(3, -1)
            behind = len(token_ids) - start - count
            positions[:, start + count :] = first + max(grid[1:]) + np.arange(behind)
        return positions


@dataclass(frozen=True)
class MicroImages:
    """The images of a micro-batch: each once, however many of its samples have it.

    Attributes:
        batches: The images of each prompt; a vision tower that is frozen encodes one of them once per iteration.
        feature: For each token, the row of the images' features instead of its embedding, int64 [T]; -1 for text.
        positions: The rotary positions, int64 [3, T]; None for a model with one axis.
    """

    batches: tuple[ImageTensors, ...]
    feature: torch.Tensor
    positions: torch.Tensor | None
