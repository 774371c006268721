"""What GPUs can do by their maker's data sheets, so that the page shows shares of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """One GPU.

    Attributes:
        bf16: Dense matrix products in bf16, operations per second.
        memory: Bandwidth of its memory, GB/s.
        nvlink: To another GPU of its node, one way, GB/s; 0 without NVLink.
        pcie: From the host, one way, GB/s: 16 lanes of generation 4 or 5, without the 128b/130b code's overhead.
    """

    bf16: float
    memory: float
    nvlink: float
    pcie: float


# From NVIDIA's data sheets, which add up both directions of NVLink and PCIe. A GPU with several forms has SXM's
# figures.
DEVICES = {
    "B200": Figures(2250e12, 7700, 900, 63.0),
    "H200": Figures(989e12, 4800, 450, 63.0),
    "H100": Figures(989e12, 3350, 450, 63.0),
    "H20": Figures(148e12, 4000, 450, 63.0),
    "A100": Figures(312e12, 2039, 300, 31.5),
    "L40S": Figures(362e12, 864, 0, 31.5),
    "L4": Figures(121e12, 300, 0, 31.5),
}


def figures_of(name: str) -> Figures | None:
    """Return the figures of the GPU that CUDA calls ``name``; None if the table does not have it.

    >>> figures_of("NVIDIA H100 80GB HBM3").memory
    3350
    """
    return next((figures for known, figures in DEVICES.items() if known in name.replace("-", " ").split()), None)
