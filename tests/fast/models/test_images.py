"""Families of models that read images."""

from importlib import import_module
from pkgutil import iter_modules

from miles.models.families import vision
from miles.models.images import vision_family
from miles.models.reading import WITH_IMAGES


def test_every_type_that_reads_images_has_its_family() -> None:
    files = [import_module(f"{vision.__name__}.{file.name}") for file in iter_modules(vision.__path__)]
    assert sorted(family.model_type for file in files for family in file.VISION) == sorted(WITH_IMAGES)
    assert all(vision_family(kind) is not None for kind in WITH_IMAGES) and vision_family("qwen3") is None
