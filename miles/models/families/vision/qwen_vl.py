"""Qwen2.5-VL and Qwen3-VL: images of any size as a grid of patches, with 3-D rotary positions.

``merge`` x ``merge`` neighboring patches become one token. Qwen3-VL also adds features of earlier layers of the tower
to the hidden states of the first decoder layers (DeepStack, arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.models.images import VisionFamily

if TYPE_CHECKING:
    import torch


class QwenVL(VisionFamily):
    """One of the two."""

    def grids(self, config: Any, tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the grid of tokens of each image: the grid of its patches, merged."""
        merge = config.vision_config.spatial_merge_size
        grids: np.ndarray = tensors["image_grid_thw"] // np.array([1, merge, merge])
        return grids

    def sized(self, processor: Any, sizes: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
        """Return a grid with as many patches for each image: a check reads the sizes of all images of a set."""
        patches = processor.image_processor.get_number_of_image_patches
        return {"image_grid_thw": np.array([(1, 1, patches(height, width)) for width, height in sizes])}

    def blank(self, config: Any) -> dict[str, np.ndarray]:
        """Return an image of one token."""
        vision = config.vision_config
        merge, side = vision.spatial_merge_size, vision.patch_size
        width = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * side * side
        grid = np.array([[1, merge, merge]])
        return {"pixel_values": np.zeros((merge * merge, width), np.float32), "image_grid_thw": grid}

    def features(self, body: Any, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the features instead of embeddings, and those that DeepStack adds."""
        import torch

        output = body.get_image_features(**tensors, return_dict=True)
        deeper = getattr(output, "deepstack_features", None) or []
        return [torch.cat(tuple(output.pooler_output)), *(torch.cat(tuple(layer)) for layer in deeper)]


VISION = tuple(QwenVL(kind, ("pixel_values", "image_grid_thw"), ("visual",)) for kind in ("qwen2_5_vl", "qwen3_vl"))
