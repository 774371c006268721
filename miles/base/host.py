"""Look at this host without importing torch: GPUs, cores, the arithmetic of the CPU, and memory."""

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

GIB = 2**30
_DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # the last is for a GPU under WSL
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86, and of Arm
# Of versions 2 and 1 of control groups: the files of limit and use, and the entry of memory.stat for old file pages.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def has_gpu() -> bool:
    """Return whether this host has a device file of an NVIDIA GPU."""
    return any(Path(file).exists() for file in _DEVICE_FILES)


def num_gpus(devices: str = "/dev") -> int | None:
    """Return how many GPUs a process of this host sees; None if that is not known, as under WSL."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [word.strip() for word in visible.split(",")]
        return next((place for place, word in enumerate(ids) if word in ("", "-1", "NoDevFiles")), len(ids))
    files = [file for file in os.listdir(devices) if re.fullmatch(r"nvidia\d+", file)]
    return None if not files and has_gpu() else len(files)


def has_bf16(cpu: str = "/proc/cpuinfo") -> bool:
    """Return whether the CPU has bf16 arithmetic, by the features that the kernel reports in the file ``cpu``."""
    return not _BF16_FEATURES.isdisjoint((_text_of(Path(cpu)) or "").split())


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_quota(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> float | None:
    """Return how many cores this process's control group may keep busy; None without a limit."""
    quotas = []
    for folder in _control_groups("cpu", root, own):
        words = (_text_of(folder / "cpu.max") or "max").split()  # version 2: quota and period
        if len(words) != 2 or words[0] == "max":
            words = [_text_of(folder / f"cpu.cfs_{name}_us") or "-1" for name in ("quota", "period")]
        if all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def busy_cores() -> int:
    """Return how many cores this process can keep busy: those it may use, or fewer under a quota; at least 1."""
    quota = cpu_quota()
    return num_cores() if quota is None else max(1, min(num_cores(), int(quota)))


def memory_bytes(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """Return the memory that this process may use: the machine's, or less in a container or a job with a limit."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(limit for limit, *_ in _memory_limits(root, own))])


def memory_limit(gib: float | None) -> int:
    """Return ``gib`` in bytes; by default half of the memory that this process may use."""
    return memory_bytes() // 2 if gib is None else int(gib * GIB)


def available_bytes(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int:
    """Return the memory that this process can still take without swapping: of the machine, or less under a limit.

    A control group can reclaim the file pages that it has not used for a while, so these count as free.
    """
    left = [_available_on_machine()]
    for limit, folder, used_name, reclaimed_name in _memory_limits(root, own):
        if (used := _text_of(folder / used_name) or "").isdigit():
            counts = dict(line.split() for line in (_text_of(folder / "memory.stat") or "").splitlines())
            left.append(max(0, limit - int(used) + int(counts.get(reclaimed_name, 0))))
    return min(left)


def _memory_limits(root: str, own: str) -> Iterator[tuple[int, Path, str, str]]:
    """Yield each limit of this process's control groups, its folder, and the names of use and of old file pages."""
    for folder in _control_groups("memory", root, own):
        for limit_name, used_name, reclaimed_name in _MEMORY_FILES:
            if (limit := _text_of(folder / limit_name) or "").isdigit():
                yield int(limit), folder, used_name, reclaimed_name


def resident_bytes(status: str = "/proc/self/statm") -> int:
    """Return the memory that this process holds, by the numbers of pages in the file ``status``."""
    return int(Path(status).read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available_on_machine() -> int:
    for line in (_text_of(Path("/proc/meminfo")) or "").splitlines():
        name, _, words = line.partition(":")
        if name == "MemAvailable":
            return int(words.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _control_groups(controller: str, root: str, own: str) -> list[Path]:
    """Return the folders of this process's control group and of those above it, of versions 1 and 2."""
    folders = [Path(root), Path(root, controller)]  # a container sees its own group here
    for line in (_text_of(Path(own)) or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = Path(root, controller) if controllers else Path(root)
        group = base / path.lstrip("/")
        folders += [group, *(folder for folder in group.parents if folder.is_relative_to(base))]
    return folders


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


# Keep PyTorch off AMX (tiled bf16 and int8 arithmetic of Intel CPUs) on hosts that do not describe its tiles.
#
# Some virtual machines report AMX and leave out leaf 0x1D of CPUID, the list of tile palettes. oneDNN then loads
# palette 0, which has no tiles, and the first bf16 matrix product of a process ends it with SIGILL (seen with PyTorch
# 2.13). The palette is chosen in oneDNN's ``src/cpu/x64/amx_tile_configure.cpp``. Limited to AVX-512, oneDNN computes
# correctly.


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


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
