"""Keep PyTorch off AMX (tiled bf16 and int8 arithmetic of Intel CPUs) on hosts that do not describe its tiles.

Some virtual machines report AMX and leave out leaf 0x1D of CPUID, the list of tile palettes. oneDNN then loads palette
0, which has no tiles, and the first bf16 matrix product of a process ends it with SIGILL (seen with PyTorch 2.13). The
palette is chosen in oneDNN's ``src/cpu/x64/amx_tile_configure.cpp``. Limited to AVX-512, oneDNN computes correctly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_LIMIT = "ONEDNN_MAX_CPU_ISA"  # read when oneDNN computes for the first time in a process, and inherited by children
_HIGHEST_LEAF, _TILE_PALETTES = 0, 0x1D
# push rbx; mov eax, edi; xor ecx, ecx; cpuid; pop rbx; ret: EAX of the leaf that is the first argument.
_READ_CPUID = bytes.fromhex("53 89f8 31c9 0fa2 5b c3")


def avoid_unusable_amx() -> None:
    """Limit oneDNN to AVX-512 in this process and its children, if AMX would end them. A given limit stays."""
    if not any(name in os.environ for name in (_LIMIT, "DNNL_MAX_CPU_ISA")) and lacks_tile_palettes():
        os.environ[_LIMIT] = "AVX512_CORE_FP16"  # the highest one below AMX


def lacks_tile_palettes(cpu: str = "/proc/cpuinfo") -> bool:
    """Return whether the CPU reports AMX, in the file ``cpu``, and no palette of tiles; false if it cannot be asked."""
    if os.uname().machine != "x86_64":
        return False
    try:
        if "amx_tile" not in Path(cpu).read_text(encoding="utf-8", errors="replace").split():
            return False
        return _cpuid(_HIGHEST_LEAF) < _TILE_PALETTES or _cpuid(_TILE_PALETTES) == 0
    except OSError:  # no such file, or a kernel that forbids new executable memory
        return False


def _cpuid(leaf: int) -> int:
    """Return EAX of a leaf of CPUID, which Python itself cannot execute."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_READ_CPUID)
        first_byte = ctypes.c_char.from_buffer(page)
        answer = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(ctypes.addressof(first_byte))(leaf)
        del first_byte  # a page with views cannot be closed
    return int(answer)
