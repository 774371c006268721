"""Give weights the names and shapes that they have in checkpoints of the model's publishers.

transformers changes some while it loads a model: it holds the experts of a layer as one tensor, for instance. Servers
load the names on disk. SGLang 0.5.23 passes over others in silence (``models/qwen3_moe.py``, ``glm4_moe.py``) or ends
(``qwen3_next.py``), and knows the names of transformers for some families only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion


def as_on_disk(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights`` of ``model`` as ``save_pretrained`` would write them, in the same order.

    One tensor of the model at a time becomes one or more on disk. If several become one, the model is converted as a
    whole, which takes the memory of all weights.
    """
    changes = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    if not changes:
        yield from weights
    elif any(len(change.target_patterns) > 1 for change in changes if isinstance(change, WeightConverter)):
        yield from revert_weight_conversion(model, dict(weights)).items()
    else:
        for name, weight in weights:
            yield from revert_weight_conversion(model, {name: weight}).items()
