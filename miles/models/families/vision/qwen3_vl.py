"""Qwen3-VL: as Qwen2.5-VL, with features of earlier layers of the tower in the first decoder layers."""

from miles.models.families.vision.qwen2_5_vl import QwenVL

VISION = QwenVL()
