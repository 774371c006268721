"""The protocol of what stands between a Hugging Face model and Megatron's: its shape, and its weights both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from miles.training.megatron.model.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.weights.convert import WeightConverter
from miles.training.megatron.weights.hf_weights import HuggingFaceWeights


class Conversion(Protocol):
    """For the models of one config on one layout of ranks."""

    shape: dict[str, Any]
    """The fields of ``TransformerConfig`` that the model's config determines."""

    def shape_of(self, config: PretrainedConfig) -> dict[str, Any]:
        """The same of another model. Raises ``ValueError`` for one that the backend would not compute correctly."""
        ...

    def load(self, model: PolicyModel, weights: HuggingFaceWeights) -> None:
        """Fill the parameters of ``model``, in their dtype. Every rank of the layout calls it.

        Raises ``ValueError`` naming a tensor that the checkpoint does not have.
        """
        ...

    def export(
        self, model: PolicyModel, value: Callable[[torch.nn.Parameter], torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by Hugging Face name, in one order on every rank; a tied head comes once. Collective.

        ``value`` gives what is exported of a parameter: its data, or its gradient; of its shape, in any dtype.
        """
        ...


def conversion(mode: str, config: PretrainedConfig, weights: HuggingFaceWeights, ranks: Ranks) -> Conversion:
    """What ``--megatron-to-hf-mode`` names. ``weights`` are those of ``--hf-checkpoint``."""
    if mode == "bridge":
        from miles.training.megatron.weights.bridge import BridgeConversion  # its package may not be installed

        return BridgeConversion(config, weights, ranks)
    return WeightConverter(config, ranks)
