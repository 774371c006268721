"""When Megatron-Bridge can be chosen. Torch-free: packages are looked for, not imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from miles.arguments.checks import refuse
from miles.arguments.megatron import MegatronArguments

RELEASES = ("0.6.",)  # of megatron-bridge, that bridge.py was tried with
WAY_OUT = "install what docs/megatron.md names, or use raw"


def check_bridge(sizes: MegatronArguments) -> None:
    """Raises ``ValueError`` naming the flag where Megatron-Bridge is chosen and cannot be used."""
    if sizes.megatron_to_hf_mode != "bridge":
        return
    try:
        installed = version("megatron-bridge")
    except PackageNotFoundError:
        refuse("megatron_to_hf_mode", "bridge", "needs the package megatron-bridge, which is not installed", WAY_OUT)
    if not installed.startswith(RELEASES):
        tried = ", ".join(f"{release}*" for release in RELEASES)
        rule = f"megatron-bridge {installed} is installed, and only {tried} was tried"
        refuse("megatron_to_hf_mode", "bridge", rule, WAY_OUT)
    if find_spec("transformer_engine") is None:
        rule = "megatron-bridge imports Transformer Engine, which is not installed"
        refuse("megatron_to_hf_mode", "bridge", rule, WAY_OUT)
    if sizes.mtp_heads:
        rule = "with --megatron-to-hf-mode bridge: which heads a checkpoint has, and how they are named, was not tried"
        refuse("mtp_num_layers", sizes.mtp_heads, rule, "drop it, or use raw")
