"""Provide the names of torchvision that SGLang and transformers import. They are empty: a text model has no images."""

import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """Have the members of torchvision's, which transformers reads one by one."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Empty(ModuleType):
    """A package where every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    def __setattr__(self, name: str, value: Any) -> None:  # any attribute may be set, as on a module
        super().__setattr__(name, value)


io = _Empty("torchvision.io")
ops = _Empty("torchvision.ops")
transforms = _Empty("torchvision.transforms")
transforms.functional = _Empty("torchvision.transforms.functional")
transforms.v2 = _Empty("torchvision.transforms.v2")
transforms.v2.functional = _Empty("torchvision.transforms.v2.functional")
transforms.InterpolationMode = InterpolationMode
