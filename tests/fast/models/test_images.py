"""Families of models that read images."""

from miles.models.images import VisionFamily, vision_family
from miles.models.reading import WITH_IMAGES


def test_every_type_that_reads_images_has_its_family() -> None:
    assert {"llava_onevision", "qwen2_5_vl", "qwen3_vl"} <= set(WITH_IMAGES)
    assert all(isinstance(vision_family(kind), VisionFamily) for kind in WITH_IMAGES)
