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

    inputs = ("pixel_values", "image_grid_thw")
    encoders = ("visual",)

    def prepare(self, body: Any) -> None:
        """Embed patches by a matrix product, and attend in all windows and images of one size at once."""
        from torch.nn import functional as F
        from transformers import AttentionInterface

        tower = body.visual
        convolution = tower.patch_embed.proj  # whose kernel covers a patch

        def embed(patches: torch.Tensor) -> torch.Tensor:
            weight = convolution.weight
            return F.linear(patches.to(weight.dtype), weight.flatten(1), convolution.bias)

        tower.patch_embed.forward = embed
        AttentionInterface.register(NAME, attention_within_parts)
        tower.config._attn_implementation = NAME
        for block in tower.blocks:
            block.attn.register_forward_pre_hook(_with_parts, with_kwargs=True)

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


NAME = "miles_parts"  # of the attention implementation, in transformers


def _with_parts(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give attention all patches in one call, with the bounds of the parts that transformers would call it for."""
    bounds = kwargs["cu_seqlens"]
    return args, kwargs | {"cu_seqlens": bounds[[0, -1]], "parts": bounds.diff().tolist()}


def attention_within_parts(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    parts: Sequence[int],
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend from every patch to the patches of its part.

    Args:
        module: Unused.
        query: [1, heads, patches, D].
        key: The same shape.
        value: The same shape.
        attention_mask: Unused.
        scaling: The factor of the scores.
        parts: The number of patches of each part, in order.
        _: Unused.

    Returns:
        [1, patches, heads, D], and None for the attention weights.
    """
    import torch
    from torch.nn import functional as F

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    sizes = sorted(set(parts))
    lengths = np.array(parts)
    places = np.argsort(np.repeat(lengths, lengths), kind="stable")  # parts of one size together
    order = torch.from_numpy(places).to(query.device)
    if len(sizes) > 1:
        q, k, v = (x[order] for x in (q, k, v))
    attended = []
    start = 0
    for size in sizes:
        end = start + size * parts.count(size)
        qr, kr, vr = (x[start:end].unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v))
        attended.append(F.scaled_dot_product_attention(qr, kr, vr, scale=scaling).transpose(1, 2).flatten(0, 1))
        start = end
    out = torch.cat(attended)
    return (out[order.argsort()] if len(sizes) > 1 else out)[None], None


VISION = QwenVL()
