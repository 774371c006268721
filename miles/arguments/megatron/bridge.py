"""Whether Megatron-Bridge can be used. Torch-free: packages are looked up, not imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from miles.arguments.megatron.settings import MegatronArguments
from miles.flags import refuse

RELEASES = {  # that weights/bridge.py was tested with; Megatron-Bridge imports the last, whose kernels are not used
    "megatron-bridge": "0.6.",
    "megatron-core": "0.19.",
    "transformer-engine-torch": "2.",
}
WAY_OUT = "install what docs/megatron.md names, or use raw with a Llama, Qwen2, Qwen3 or Qwen3-MoE"


def check_bridge(sizes: MegatronArguments) -> None:
    """Raise ``ValueError`` naming the flag if Megatron-Bridge is chosen and cannot be used."""
    if sizes.megatron_to_hf_mode != "bridge":
        return
    for package, release in RELEASES.items():
        try:
            installed = version(package)
        except PackageNotFoundError:
            refuse("megatron_to_hf_mode", "bridge", f"needs {package}, which is not installed", WAY_OUT)
        if not installed.startswith(release):
            rule = f"{package} {installed} is installed, and only {release}* was tested"
            refuse("megatron_to_hf_mode", "bridge", rule, WAY_OUT)
    if sizes.mtp_heads:
        rule = "with --megatron-to-hf-mode bridge: the names of the heads in a checkpoint were not tested"
        refuse("mtp_num_layers", sizes.mtp_heads, rule, "drop it")
