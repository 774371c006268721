"""Every difference between releases of megatron-core that miles depends on.

``TRIED`` are the releases on which the checks of tests/fast/training/megatron have passed (docs/parallelism.md lists
them). A later release below ``BELOW`` is treated like the last of them, with a warning: if it averages gradients in
another way, the loss-mass canary of the first step (objective/canary.py) stops the run.
"""

import logging
from functools import cache
from importlib.metadata import version
from typing import Any

TRIED = ((0, 16), (0, 17), (0, 18), (0, 19))
BELOW = (0, 21)

_logger = logging.getLogger(__name__)


@cache
def megatron_version() -> tuple[int, ...]:
    """Return the installed release, ``(0, 16, 1)``. Raises ``ValueError`` for one that this file does not cover."""
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
            "megatron-core %s has not been tested with this version of miles; %s have. Keep --loss-canary on",
            installed,
            ", ".join(".".join(map(str, release)) for release in TRIED),
        )
    return numbers


def _numbers(text: str) -> tuple[int, ...]:
    """Return ``(0, 18)`` for ``0.18rc1`` and for ``0.18.dev3+local``."""
    release = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        release.append(int(digits))
        if digits != part:
            break
    return tuple(release)


# What Megatron averages over. Every tried release has the same lines; the files and functions named are from 0.16.1.


def average_of_schedule(num_micro_batches: int) -> float:
    """Return the factor that the schedule applies to a two-tuple's loss, at Megatron's own context-parallel size of 1.

    ``output_tensor *= cp_group_size; output_tensor /= num_microbatches`` (pipeline_parallel/schedules.py,
    ``forward_step_calc_loss``, the branch of the legacy two-tuple).
    """
    return 1.0 / num_micro_batches


def average_of_ddp(token_ranks: int) -> float:
    """Return the factor that data-parallel reduction applies to gradients, with ``calculate_per_token_loss`` off.

    ``gradient_scaling_factor = 1.0 / data_parallel_world_size``, for dense and expert parameters alike
    (distributed/distributed_data_parallel.py).
    """
    return 1.0 / token_ranks


# How a model is described and called.


def parts_of_experts(spec: Any) -> Any:
    """Return the ``MoESubmodules`` in the result of ``get_moe_module_spec_for_backend``, to be changed in place.

    The result is a ``ModuleSpec`` up to 0.17, and from 0.18 on a ``functools.partial`` of the layer's class.
    """
    return spec.submodules if megatron_version() < (0, 18) else spec.keywords["submodules"]


def mtp_layer_name() -> str:
    """Return the name of the decoder layer in a head of multi-token prediction, in specs and parameter names."""
    return "transformer_layer" if megatron_version() < (0, 17) else "mtp_model_layer"


def inputs_of_head(input_ids: Any, position_ids: Any, padding_mask: Any, embedded: Any, hidden: Any) -> tuple[Any, ...]:
    """Return the result of a head's ``_get_embeddings``, which from 0.18 on includes the padding mask."""
    if megatron_version() < (0, 18):
        return input_ids, position_ids, embedded, hidden
    return input_ids, position_ids, padding_mask, embedded, hidden


def recomputed_function(function: Any) -> tuple[Any, ...]:
    """Return the positional arguments of a head's ``_checkpointed_forward``: from 0.18 on none."""
    return (function,) if megatron_version() < (0, 18) else ()


# How a checkpoint is written.


def objects_to_write() -> tuple[str, ...]:
    """Return the names under which ``dist_checkpointing.save`` passes a strategy objects to write, besides tensors.

    From 0.19 on, the state common to all ranks. Earlier releases wrote it themselves, to a file ``common.pt``.
    """
    return () if megatron_version() < (0, 19) else ("common_state",)
