"""Run the decoder layers of Llama, Qwen2 and Qwen3 on a CPU with few operations and little Python.

oneDNN's products apply SiLU, multiply gate and up, and add the residual before they round, so that these take no pass
of their own. The weights of the layers are kept in oneDNN's layout, which every product would otherwise make again;
this copy replaces the model's. Other models run through transformers. docs/performance.md has the figures.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from miles.engine.embedded.attention import Layer, Step

_PLAIN_LAYERS: tuple[type[PreTrainedModel], ...] = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def can_fuse(model: Any) -> bool:
    """Return whether the layers of ``model`` are of the kind that ``FusedLayers`` computes, and this CPU has oneDNN."""
    if type(model) not in _PLAIN_LAYERS or model.device.type != "cpu" or model.config.hidden_act != "silu":
        return False
    if set(getattr(model.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    bf16: bool = model.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or model.dtype == torch.float32


class FusedLayers:
    """Compute the output of the body of a model of ``_PLAIN_LAYERS``: hidden states after the last norm."""

    def __init__(self, model: Any) -> None:
        """Take the weights out of ``model``, which must pass ``can_fuse``; its parameters keep their shapes."""
        self._body = model.model
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm)
        products = {id(product.emptied): product for layer in self._layers for product in layer.products}
        # What loads a weight, by the name of the parameter that it was taken from.
        self.load: dict[str, Callable[[torch.Tensor], None]] = {
            name: products[id(weight)].load for name, weight in model.named_parameters() if id(weight) in products
        }

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the hidden states [B, T, H] of tokens ``ids`` [B, T] at ``positions`` [1 or B, T]."""
        embedded = self._body.embed_tokens(ids)
        cos, sin = self._body.rotary_emb(embedded, positions)
        cos, sin = cos[:, :, None], sin[:, :, None, : sin.shape[-1] // 2]
        hidden = embedded.flatten(0, 1)
        for layer in self._layers:
            hidden = layer.forward(hidden, ids.shape, cos, sin, step)
        return self._norm(hidden).view(embedded.shape)


class _Norm:
    """An RMS norm over the last axis, rounded as transformers' norms are: before the weight, and after it."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._eps = torch.tensor(norm.variance_epsilon, dtype=torch.float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, size, size, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale, out=torch.empty_like(x)).mul_(self._weight)


class _Layer:
    """A decoder layer: attention and a gated MLP, each after a norm and added to its input."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = Layer(attention.layer_idx, attention.scaling)
        self._head_dim: int = attention.head_dim
        self._projections = [_Product(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self._out = _Product(attention.o_proj)
        self._head_norms = [_Norm(attention.q_norm), _Norm(attention.k_norm)] if hasattr(attention, "q_norm") else None
        self._gate, self._up, self._down = (_Product(p) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.products = [*self._projections, self._out, self._gate, self._up, self._down]
        self._input_norm = _Norm(layer.input_layernorm)
        self._mlp_norm = _Norm(layer.post_attention_layernorm)

    def forward(
        self,
        hidden: torch.Tensor,
        shape: torch.Size,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Return the layer's output of ``hidden`` [B * T, H]; ``shape`` is [B, T]."""
        normed = self._input_norm(hidden)
        query, key, value = (p.of(normed).view(*shape, -1, self._head_dim) for p in self._projections)
        if self._head_norms is not None:
            query, key = (norm(x) for norm, x in zip(self._head_norms, (query, key), strict=True))
        query, key, value = (x.transpose(1, 2) for x in (_rotated(query, cos, sin), _rotated(key, cos, sin), value))
        attended = step.attend(self._attention, query, key, value)
        hidden = self._out.added_to(hidden, attended.transpose(1, 2).reshape(len(hidden), -1))
        normed = self._mlp_norm(hidden)
        return self._down.added_to(hidden, self._up.times(self._gate.silu(normed), normed))


class _Product:
    """A linear layer and the operation that follows it, whose result is rounded once."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self.emptied = linear.weight
        self._bias = linear.bias
        self.load(linear.weight.data)
        linear.weight.data = linear.weight.data.new_zeros(()).expand(linear.weight.shape)

    @torch.inference_mode()
    def load(self, weight: torch.Tensor) -> None:
        """Replace the weight by ``weight`` [out, in], of any dtype."""
        plain = weight.to(self.emptied.dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(plain)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``linear(x)`` for x [R, in]."""
        return self._run(x, self._weight, self._bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``silu(linear(x))``."""
        return self._run(x, self._weight, self._bias, "swish", [], "")

    def times(self, other: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``linear(x) * other``."""
        return self._run_with(x, other, self._weight, self._bias, "mul")

    def added_to(self, other: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``linear(x) + other``."""
        return self._run_with(x, other, self._weight, self._bias, "add")

    _run: Callable[..., torch.Tensor] = staticmethod(torch.ops.mkldnn._linear_pointwise.default)
    _run_with: Callable[..., torch.Tensor] = staticmethod(torch.ops.mkldnn._linear_pointwise.binary)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to x [B, T, heads, D]; cos [1 or B, T, 1, D], and the first half of sin's last axis."""
    first, second = x.chunk(2, -1)
    rotated = x * cos
    low, high = rotated.chunk(2, -1)
    low.addcmul_(second, sin, value=-1)
    high.addcmul_(first, sin)
    return rotated
