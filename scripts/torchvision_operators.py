"""Let ``import torchvision`` succeed next to a torch built for CPU, if its wheel is built for CUDA.

``PYTHON scripts/torchvision_operators.py`` copies this file into the environment of PYTHON, with a ``.pth`` file that
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
if __name__ != "__main__":
    sys.meta_path.insert(0, _DeclaresOperators())
else:
    import shutil
    import sysconfig
    from pathlib import Path

    packages = Path(sysconfig.get_path("purelib"))
    shutil.copy(__file__, packages)
    (packages / "torchvision_operators.pth").write_text("import torchvision_operators\n")
