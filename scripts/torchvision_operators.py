"""Let ``import torchvision`` succeed next to a torch built for CPU, if its wheel is built for CUDA.

scripts/venv.sh copies this file into an environment whose torchvision cannot be imported, with a ``.pth`` file that
imports it at start. The compiled part of such a torchvision does not load, so its Python part fails where it describes
two operators. Declaring them first is enough: image transforms are plain PyTorch.
"""

import sys


class _DeclaresOperators:
    """Stand before the finders of modules, and declare the operators when torchvision is first looked for."""

    def find_spec(self, name, path=None, target=None):
        """Return None: others find the module."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            self.library = Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _KEPT.append(self)  # the declarations last as long as the object
        return None


_KEPT = []
sys.meta_path.insert(0, _DeclaresOperators())
