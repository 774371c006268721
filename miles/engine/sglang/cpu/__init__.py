"""Packages that only SGLang servers on CPU see: replacements for two that are imported there and never called.

SGLang 0.5.23 imports ``sgl_kernel`` (CUDA kernels) and ``torchvision`` (images) at start-up, on every device. Neither
is called when a text model runs on CPU with the torch_native attention. ``launch.py`` puts this folder on the import
path of such servers, and ``without_images`` if the model reads none; on a GPU the real packages are used. Remove it
when SGLang imports the two lazily.
"""
