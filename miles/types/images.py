"""The images of a prompt: as files, as tensors for the model's vision tower, and in a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, in the order of their placeholders. All samples of a group share the object.

    Attributes:
        files: Each encoded image (PNG, JPEG, …).
        sizes: Width and height to which each is resized before the model's processor reads it.
        counts: How many tokens each takes in the prompt.
        placeholder_id: The token that they are.
        unexpanded_ids: The prompt's tokens with one placeholder per image, as SGLang takes them.
        model: The folder or name that the processor is loaded from.
        where: The location of the row, for messages.
        cache: What was computed of the images in this process (``models.images``).
    """

    files: tuple[bytes, ...]
    sizes: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]
    placeholder_id: int
    unexpanded_ids: tuple[int, ...]
    model: str
    where: str = field(default="", compare=False)
    cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process can compute."""
        return self.__dict__ | {"cache": {}}


@dataclass(frozen=True, eq=False)
class ImageTensors:
    """The images of one prompt as the model's processor makes them, shared by all samples of a group.

    Attributes:
        tensors: The processor's, by the names of the model's arguments, with the images along the first axis.
        counts: How many tokens each image takes.
        placeholder_id: The token that they are.
        grids: For models with 3-D rotary positions: the temporal, vertical and horizontal positions that the tokens of
            each image take, int64 [images, 3]. None for other models.
    """

    tensors: Mapping[str, np.ndarray]
    counts: tuple[int, ...]
    placeholder_id: int
    grids: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """The memory that the tensors take."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def places(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the positions of the images' tokens in a sample, int64 [sum of counts].

        Placeholders behind them were sampled, and are text.

        Raises:
            ValueError: The sample has fewer placeholders than the images have tokens, or the images other features.
        """
        if self.grids is not None and (self.grids.prod(1) != self.counts).any():
            raise ValueError(
                f"images take {sum(self.counts)} tokens, and their grids have {self.grids.prod(1).sum()} features"
            )
        places = np.flatnonzero(token_ids == self.placeholder_id)
        if len(places) < sum(self.counts):
            raise ValueError(
                f"a sample has {len(places)} placeholders of images, and its images take {sum(self.counts)} tokens; "
                "functions of your own must keep the prompt's tokens"
            )
        return places[: sum(self.counts)]

    def positions(self, token_ids: np.ndarray) -> np.ndarray | None:
        """Return the rotary positions of a sample's tokens, int64 [3, tokens]; None for a model with one axis.

        Text advances all three axes together. An image begins where the text before it ends; its tokens count along
        the axes of its grid, and the text behind it continues after the longest side.
        """
        if self.grids is None:
            return None
        found = np.tile(np.arange(len(token_ids)), (3, 1))
        starts = self.places(token_ids)[np.cumsum(self.counts) - self.counts]
        for start, count, grid in zip(starts.tolist(), self.counts, self.grids.tolist(), strict=True):
            first = found[0, start]
            found[:, start : start + count] = first + np.indices(grid).reshape(3, -1)
            behind = len(token_ids) - start - count
            found[:, start + count :] = first + max(grid[1:]) + np.arange(behind)
        return found


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
