"""What differs between releases of megatron-core. Written against 0.16.1; every difference stands in this file."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED = ("0.16", "0.21")  # from, up to but not including


def megatron_version() -> tuple[int, ...]:
    """The installed release, ``(0, 16, 1)``. Raises ``ValueError`` for one that was never tried."""
    installed = version("megatron-core")
    numbers = _numbers(installed)
    first, last = (_numbers(bound) for bound in SUPPORTED)
    if not first <= numbers < last:
        raise ValueError(
            f"--train-backend megatron: megatron-core {installed} is installed, and this version of miles works with "
            f"{SUPPORTED[0]} up to {SUPPORTED[1]} (exclusive); install the extra: pip install 'miles[megatron]'"
        )
    return numbers


def _numbers(text: str) -> tuple[int, ...]:
    release = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        release.append(int(digits))
    return tuple(release)


def mtp_layer_name() -> str:
    """What the decoder layer in a head of multi-token prediction is called, in its spec and in parameter names."""
    return "transformer_layer" if megatron_version() < (0, 17) else "mtp_model_layer"


def average_of_schedule(num_micro_batches: int) -> float:
    """What the schedule multiplies a two-tuple's loss by, at Megatron's own context-parallel size of 1.

    0.16: ``output_tensor *= cp_group_size; output_tensor /= num_microbatches`` (pipeline_parallel/schedules.py,
    ``forward_step_calc_loss``, the branch of the legacy two-tuple).
    """
    return 1.0 / num_micro_batches


def average_of_ddp(dp_size: int) -> float:
    """What the data-parallel reduction multiplies gradients by where ``calculate_per_token_loss`` is off.

    0.16: ``gradient_scaling_factor = 1.0 / data_parallel_world_size``, for dense and expert parameters alike
    (distributed/distributed_data_parallel.py).
    """
    return 1.0 / dp_size
