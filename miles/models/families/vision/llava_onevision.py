"""LLaVA-OneVision: an image alone is cut into tiles of the tower's size; several images are one tile each."""

from typing import Any

import numpy as np

from miles.models.images import VisionFamily


class LlavaOnevision(VisionFamily):
    """Tokens have one rotary axis, like text tokens."""

    inputs = ("pixel_values", "image_sizes", "batch_num_images")
    encoders = ("vision_tower", "multi_modal_projector", "image_newline")

    def blank(self, config: Any) -> dict[str, np.ndarray]:
        """Return two images of one tile: a single one would be cut."""
        side = config.vision_config.image_size
        return {
            "pixel_values": np.zeros((2, 1, 3, side, side), np.float32),
            "image_sizes": np.full((2, 2), side),
            "batch_num_images": np.array([2]),
        }


VISION = LlavaOnevision()
