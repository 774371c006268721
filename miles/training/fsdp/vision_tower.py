"""The vision tower of a model that is trained: from the images of a micro-batch to what its language part reads."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from miles.models.images import joined, text_inputs, vision_family
from miles.types.images import ImageTensors, MicroImages


class VisionTower:
    """Encodes the images of micro-batches. A frozen tower encodes a prompt's images once, as long as they are held.

    No module: its layers are the model's.
    """

    def __init__(self, body: Any) -> None:
        self._body = body
        self._family = vision_family(body.config.model_type)
        self._family.prepare(body)
        self._blank = ImageTensors(self._family.blank(body.config), (), (), -1)  # no token stands for it
        self._known: WeakKeyDictionary[ImageTensors, list[torch.Tensor]] = WeakKeyDictionary()

    def freeze(self) -> None:
        """Leave everything that encodes images unchanged."""
        for name in self._family.encoders:
            getattr(self._body, name).requires_grad_(False)

    def inputs(self, ids: torch.Tensor, images: MicroImages | None) -> dict[str, Any]:
        """Return the inputs that the language part reads instead of ``ids`` [rows, T].

        A tower that is trained encodes a blank image if there is none: FSDP reduces the gradients of all ranks
        together, and a rank that has none for the tower would not take part.
        """
        parts = [getattr(self._body, name) for name in self._family.encoders]
        weights = [w for part in parts for w in ([part] if isinstance(part, nn.Parameter) else part.parameters())]
        batches = () if images is None else images.batches
        feature = torch.full_like(ids, -1) if images is None else images.feature.view(ids.shape)
        if any(weight.requires_grad for weight in weights):
            features = self._encode(batches or (self._blank,), ids.device)
        elif batches:
            for batch in batches:
                if batch not in self._known:
                    with torch.no_grad():
                        self._known[batch] = self._encode((batch,), ids.device)
            features = [torch.cat(layer) for layer in zip(*(self._known[batch] for batch in batches), strict=True)]
        else:
            return text_inputs(self._body, ids, None, None)
        return text_inputs(self._body, ids, feature, features)

    def _encode(self, batches: Sequence[ImageTensors], device: torch.device) -> list[torch.Tensor]:
        features = self._family.features(self._body, joined(batches, device))
        wanted = sum(sum(batch.counts) for batch in batches)
        if wanted and len(features[0]) != wanted:
            raise ValueError(f"images take {wanted} tokens, and the vision tower makes {len(features[0])} features")
        return features
