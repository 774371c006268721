"""The routers of a transformers model: record the experts that they choose, or set them.

Given experts replace the choice alone. The weights of the experts are computed from the router's own logits, as the
model does, so gradients reach the router (rollout routing replay, arXiv 2510.11370).
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from miles.base.attributes import set_within
from miles.types.replay import UNKNOWN, dtype_for

_LAYER = re.compile(r"layers\.(\d+)\.(?:mlp|mixer)\.gate$")


def _softmax_weights(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Weigh by softmax over all experts, normalized over the chosen if the model does (transformers, qwen3_moe).

    The router of qwen3_5_moe has no such setting, and always does.
    """
    weights = torch.softmax(logits, -1, dtype=torch.float).gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype)


def _sigmoid_weights(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Weigh by sigmoid scores without the bias of the choice, normalized and scaled (transformers, deepseek_v3)."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    scaled: torch.Tensor = weights * router.routed_scaling_factor
    return scaled


# The weights of given experts, by ``model_type``. A type is listed only if a test compares it with its own routing.
WEIGHTS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "qwen3_moe": _softmax_weights,
    "qwen3_next": _softmax_weights,
    "qwen3_5_moe": _softmax_weights,
    "qwen3_5_moe_text": _softmax_weights,
    "deepseek_v3": _sigmoid_weights,
    "deepseek_v32": _sigmoid_weights,
    "glm4_moe": _sigmoid_weights,
    "glm4_moe_lite": _sigmoid_weights,
    "glm_moe_dsa": _sigmoid_weights,
    "nemotron_h": _sigmoid_weights,
}


class Routers:
    """All routers of one model, by hooks on them. They do nothing until ``replay`` or ``recording``."""

    def __init__(self, model: torch.nn.Module, flag: str) -> None:
        """Find the routers of ``model``. Raises ``ValueError`` naming ``flag`` if there are none, or unknown ones."""
        of_model: Any = model.config
        config = of_model.get_text_config()
        self.layers: int = config.num_hidden_layers
        kind = str(config.model_type)
        routers = {int(match[1]): m for name, m in model.named_modules() if (match := _LAYER.search(name))}
        if kind not in WEIGHTS:
            why = f"the routers of {', '.join(WEIGHTS)} can be given experts, and this model is {kind}"
            raise ValueError(f"{flag}: {why}; drop {flag}, or choose another model")
        if not routers:
            raise ValueError(f"{flag}: this model has no layer with experts; drop {flag}")
        first = next(iter(routers.values()))
        self.topk = int(first.top_k)
        self._dtype = dtype_for(int(first.num_experts))
        self._weights = WEIGHTS[kind]
        self._replayed: torch.Tensor | None = None
        self._records = False
        self._chosen: dict[int, torch.Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[..., Any]:
        def choose(router: torch.nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, weights, experts = output
            if self._replayed is not None:
                chosen = self._replayed[:, layer].long()
                experts = torch.where(chosen == UNKNOWN, experts, chosen)
                weights = self._weights(router, logits, experts)
            if self._records:
                self._chosen[layer] = experts.detach()
            return logits, weights, experts

        return choose

    def replay(self, experts: torch.Tensor | None) -> None:
        """Have the routers take ``experts``, int16 [T, layers, k] of the tokens of the next passes; None ends that.

        It holds until the next call, so that a backward pass that computes a layer again takes the same experts.
        """
        self._replayed = experts

    def recording(self) -> AbstractContextManager[None]:
        """Keep the experts that the block's pass chooses, for ``take``."""
        self._chosen = {}
        return set_within(self, _records=True)

    def take(self) -> torch.Tensor:
        """Return the choices of the recorded pass, int64 [T, layers, k]; 0 in layers without experts."""
        some = next(iter(self._chosen.values()))
        columns = [self._chosen.get(layer, torch.zeros_like(some)) for layer in range(self.layers)]
        self._chosen = {}
        return torch.stack(columns, 1)

    def take_numpy(self) -> np.ndarray:
        """Return the same in host memory, in the smallest dtype."""
        experts: np.ndarray = self.take().cpu().numpy().astype(self._dtype)
        return experts
