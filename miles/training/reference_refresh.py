"""Let the reference follow the policy: ``--ref-update-interval N`` and ``--ref-mixup-alpha``.

After every N-th iteration the weights of the reference become::

    ref <- alpha policy + (1 - alpha) ref

(Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment", arXiv 2404.09656: with alpha 1 its hard
update, below 1 its soft one. TRL's ``sync_ref_model`` has the same formula, with ``ref_model_mixup_alpha`` and
``ref_model_sync_steps``, which counts optimizer steps.) The policy's weights are those that it computes with. What is
mixed stays in fp32: in bf16, a change of less than 1/256 of a weight would be lost each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import PretrainedConfig


def names_of_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, tied ones once, and the buffers that checkpoints have."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def check_can_follow(
    reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor], path: str | None
) -> None:
    """Check that reference and policy have the same weights.

    Positions are not weights: a reference keeps its own rotary embedding, so one with another is refused by its config
    (``check_same_positions``).

    Raises:
        ValueError: The model at ``path`` has others.
    """
    for name in (*reference, *policy):
        shapes = [tuple(model[name].shape) if name in model else "none" for model in (reference, policy)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"--ref-load {path}: its {name} has the shape {shapes[0]}, and the policy's {shapes[1]}, so the "
                "reference cannot follow the policy; give a model of the policy's shape, or drop --ref-update-interval"
            )


def check_same_positions(reference: PretrainedConfig, policy: PretrainedConfig, path: str | None) -> None:
    """Check that both models encode positions alike.

    Raises:
        ValueError: The model at ``path`` has another rotary embedding, with which the policy's weights mean something
            else.
    """
    found, own = (getattr(config.get_text_config(), "rope_parameters", None) for config in (reference, policy))
    if found != own:
        raise ValueError(
            f"--ref-load {path}: its rope_parameters are {found}, and the policy's {own}, so the reference cannot "
            "follow the policy; give a model with the policy's, or drop --ref-update-interval"
        )


@torch.no_grad()
def follow(reference: Mapping[str, torch.Tensor], policy: Mapping[str, torch.Tensor], alpha: float) -> None:
    """Set every weight of ``reference`` to ``alpha policy + (1 - alpha) reference``, in place and in its own dtype.

    Args:
        reference: Weights by name, this rank's parts.
        policy: The policy's weights as it computes with them, with these names and maybe more, in the same parts.
        alpha: The part of the policy, in (0, 1].
    """
    for name, kept in reference.items():
        new = policy[name].detach()
        if alpha == 1 or not kept.is_floating_point():
            kept.copy_(new)
        else:
            kept.lerp_(new.to(kept.dtype), alpha)
