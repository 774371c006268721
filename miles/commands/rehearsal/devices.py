"""The devices whose speed is assumed, from their makers' data sheets, or from a file of measured figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from miles.base import strict_json
from miles.base.flags import refuse


@dataclass(frozen=True)
class Device:
    """One accelerator in a node of eight.

    Attributes:
        name: Its name in the report.
        memory: GiB that PyTorch can use.
        bf16: Dense matrix products in bf16, TFLOP/s.
        fp32: The same in fp32, without TF32, TFLOP/s.
        bandwidth: Of its memory, TB/s.
        link: To a GPU of the same node, one way, GB/s.
        network: To another node, of one GPU, one way, GB/s.
        gpus_per_node: GPUs that ``link`` connects.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    link: float
    network: float
    gpus_per_node: int = 8


# NVIDIA's data sheets of the SXM modules; network: one 200 or 400 Gbit/s adapter per GPU, as in DGX systems.
KNOWN: Mapping[str, Device] = {
    "a100": Device("A100 80 GB", 79.2, 312, 19.5, 2.04, 300, 25),
    "h100": Device("H100 80 GB", 79.1, 989, 67, 3.35, 450, 50),
    "h200": Device("H200 141 GB", 139.8, 989, 67, 4.8, 450, 50),
    "b200": Device("B200 180 GB", 178.3, 2250, 75, 7.7, 900, 50),
}


def device_of(name: str) -> Device:
    """Return the device that ``--rehearse-device`` names: one of ``KNOWN``, or a file with fields of ``Device``.

    A file may name a known device as ``base``, whose figures it replaces in part.

    Raises:
        FlagError: The file is no such description.
    """
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    what_to_do = f"write a JSON object with {', '.join(f.name for f in fields(Device))}, or base and some of them"
    try:
        given = strict_json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, strict_json.StrictJsonError) as error:
        refuse("rehearse_device", name, f"cannot be read ({error})", what_to_do)
    if not isinstance(given, dict):
        refuse("rehearse_device", name, "is not a JSON object", what_to_do)
    base = given.pop("base", None)
    unknown = given.keys() - {f.name for f in fields(Device)}
    if unknown:
        refuse("rehearse_device", name, f"has unknown fields: {', '.join(sorted(unknown))}", what_to_do)
    wrong = [key for key, value in given.items() if key != "name" and not _is_positive(value)]
    if wrong:
        refuse("rehearse_device", name, f"{', '.join(wrong)} must be numbers above 0", what_to_do)
    if base is not None:
        if not isinstance(base, str) or base not in KNOWN:
            refuse("rehearse_device", name, f"base {base!r} is not known", f"give one of {', '.join(KNOWN)}")
        return replace(KNOWN[base], **{"name": f"{KNOWN[base].name}, measured", **given})
    missing = {f.name for f in fields(Device)} - {"gpus_per_node"} - given.keys()
    if missing:
        refuse("rehearse_device", name, f"lacks {', '.join(sorted(missing))}", what_to_do)
    return Device(**given)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def as_json(device: Device) -> str:
    """Return the text of a file that ``device_of`` reads."""
    return json.dumps(asdict(device), indent=2)
