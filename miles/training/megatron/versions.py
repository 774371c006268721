"""What differs between releases of megatron-core: every difference stands in this file.

``TRIED`` are the releases on which checks of tests/fast/training/megatron have passed (docs/megatron.md says which). A
later one, below ``BELOW``, is tried by whoever starts it: it is taken for the last of these, with a warning, and the
loss-mass canary of the first step (objective/canary.py) stops a run whose averaging is another one.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import version
from typing import Any

TRIED = ((0, 16), (0, 17), (0, 18), (0, 19))
BELOW = (0, 21)

_logger = logging.getLogger(__name__)


@cache
def megatron_version() -> tuple[int, ...]:
    """The installed release, ``(0, 16, 1)``. Raises ``ValueError`` for one that this file says nothing of."""
    installed = version("megatron-core")
    numbers = _numbers(installed)
    if not TRIED[0] <= numbers < BELOW:
        first, below = (".".join(map(str, bound)) for bound in (TRIED[0], BELOW))
        raise ValueError(
            f"--train-backend megatron: megatron-core {installed} is installed, and this version of miles works with "
            f"{first} up to {below} (exclusive); install the extra: pip install 'miles[megatron]'"
        )
    if numbers[:2] not in TRIED:
        _logger.warning(
            "megatron-core %s was not tried with this version of miles; %s were. Keep --loss-canary on",
            installed,
            ", ".join(".".join(map(str, release)) for release in TRIED),
        )
    return numbers


def _numbers(text: str) -> tuple[int, ...]:
    """``(0, 18)`` of ``0.18rc1`` and of ``0.18.dev3+local``."""
    release = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        release.append(int(digits))
        if digits != part:
            break
    return tuple(release)


# How much Megatron averages. The same lines in every release that was tried; their place is that in 0.16.1.


def average_of_schedule(num_micro_batches: int) -> float:
    """What the schedule multiplies a two-tuple's loss by, at Megatron's own context-parallel size of 1.

    ``output_tensor *= cp_group_size; output_tensor /= num_microbatches`` (pipeline_parallel/schedules.py,
    ``forward_step_calc_loss``, the branch of the legacy two-tuple).
    """
    return 1.0 / num_micro_batches


def average_of_ddp(dp_size: int) -> float:
    """What the data-parallel reduction multiplies gradients by where ``calculate_per_token_loss`` is off.

    ``gradient_scaling_factor = 1.0 / data_parallel_world_size``, for dense and expert parameters alike
    (distributed/distributed_data_parallel.py).
    """
    return 1.0 / dp_size


# How a model is described and called.


def parts_of_experts(spec: Any) -> Any:
    """The ``MoESubmodules`` in what ``get_moe_module_spec_for_backend`` returns, to be changed in place.

    A ``ModuleSpec`` up to 0.17, and from 0.18 on a ``functools.partial`` of the layer's class.
    """
    return spec.submodules if megatron_version() < (0, 18) else spec.keywords["submodules"]


def mtp_layer_name() -> str:
    """What the decoder layer in a head of multi-token prediction is called, in its spec and in parameter names."""
    return "transformer_layer" if megatron_version() < (0, 17) else "mtp_model_layer"


def inputs_of_head(input_ids: Any, position_ids: Any, padding_mask: Any, embedded: Any, hidden: Any) -> tuple[Any, ...]:
    """What a head's ``_get_embeddings`` returns: from 0.18 on with the padding mask between."""
    if megatron_version() < (0, 18):
        return input_ids, position_ids, embedded, hidden
    return input_ids, position_ids, padding_mask, embedded, hidden


def recomputed_function(function: Any) -> tuple[Any, ...]:
    """What a head's ``_checkpointed_forward`` is given before the named arguments: from 0.18 on nothing."""
    return (function,) if megatron_version() < (0, 18) else ()


# How a checkpoint is written.


def objects_to_write() -> tuple[str, ...]:
    """The names under which ``dist_checkpointing.save`` gives a strategy objects to write, besides tensors.

    From 0.19 on what is common to all ranks, which it wrote by itself before, into a file ``common.pt``.
    """
    return () if megatron_version() < (0, 19) else ("common_state",)
