"""Note defaults that differ in related launchers, and arithmetic that is slow on this CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from miles.arguments.launch.abilities import reads_megatron_flags
from miles.arguments.settings import Settings
from miles.components import train_backend_spec

# Defaults of related launchers for FSDP; here both backends have the same.
ON_FSDP = {"weight_decay": "0", "adam_beta2": "0.95", "lr_decay_style": "constant"}


def surprises(settings: Settings, given: Collection[str], on_cpu: bool, has_bf16: bool) -> Iterator[str]:
    """Yield notes on a valid run.

    Args:
        settings: The settings.
        given: The fields that the command sets.
        on_cpu: Whether the run is on CPU.
        has_bf16: Whether the CPU has bf16 arithmetic.
    """
    if settings.training.bf16 and on_cpu and not has_bf16:
        yield "bf16 is emulated: this CPU has no bf16 arithmetic; --fp32 may be faster, and takes more memory"
    if settings.megatron.optimizer_cpu_offload and on_cpu:
        yield "--optimizer-cpu-offload: on CPU the optimizer's state is in host memory anyway"
    relied_on = [name for name in ON_FSDP if name not in given]
    if "train_backend" in given and not reads_megatron_flags(settings) and relied_on:
        here = ", ".join(f"--{name.replace('_', '-')} {getattr(settings.optimizer, name)}" for name in relied_on)
        there = ", ".join(ON_FSDP[name] for name in relied_on)
        yield f"{here}: the defaults with every backend; related launchers have {there} with FSDP"
    shares = settings.cluster.colocate and settings.num_engines > 0 and not on_cpu
    backend = settings.training.train_backend
    if shares and not settings.cluster.no_offload_train and not train_backend_spec(backend).offloads:
        yield (
            f"--colocate: the trainer stays on its GPUs while engines generate, because --train-backend {backend} "
            "cannot offload; if memory is short, lower --sglang-mem-fraction-static"
        )
