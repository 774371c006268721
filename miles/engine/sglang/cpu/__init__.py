"""Import path of SGLang servers on CPU, and of no other process: stand-ins for two packages without a use there.

SGLang 0.5.23 imports ``sgl_kernel`` (CUDA kernels) and ``torchvision`` (images) at start-up, on every device. Neither
is called when a text model runs on CPU with the torch_native attention. ``sglang_command`` puts this folder on the path
of the servers; on a GPU the real packages are used. It can go when SGLang imports the two lazily.
"""
