"""Run the model of the embedded engine: load it, run prefill and decode passes, and replace its weights in place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from miles.engine.embedded import attention
from miles.engine.embedded.attention import (
    DecodeStep,
    KVCache,
    Layer,
    LayerStates,
    PrefillStep,
    PrefixStep,
    Step,
    bound_time_steps,
)
from miles.models.packing import (
    SPARSE,
    has_recurrent_state,
    longest_generated,
    model_type,
    reads_images,
    why_not_generated,
)
from miles.models.reading import end_token_ids, read_config, read_model
from miles.models.rotary import rotated
from miles.models.routers import Routers
from miles.types.head import head_logits
from miles.types.weights import WeightChunk

if TYPE_CHECKING:
    from miles.types.images import ImageTensors, PromptImages


# Run the decoder layers of Llama, Qwen2 and Qwen3 on a CPU with few operations and little Python. The language parts of
# models that read images have the layers of these.
#
# oneDNN's products apply SiLU, multiply gate and up, and add the residual before they round, so that these take no pass
# of their own. The weights of the layers are kept in oneDNN's layout, which every product would otherwise make again;
# this copy replaces the model's. Other models run through transformers. docs/performance.md has the figures.


_PLAIN_LAYERS: tuple[type[PreTrainedModel], ...] = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_PLAIN_LANGUAGE_PARTS = ("LlamaModel", "Qwen2Model", "Qwen3Model", "Qwen2_5_VLTextModel", "Qwen3VLTextModel")


def can_fuse(model: Any) -> bool:
    """Return whether the layers of ``model`` are of the kind that ``FusedLayers`` computes, and this CPU has oneDNN."""
    body = _language_part(model)
    config = model.config.get_text_config()
    # By name: importing the types of language parts takes a text run longer.
    is_plain_part = body is not model.base_model and type(body).__name__ in _PLAIN_LANGUAGE_PARTS
    is_plain = type(model) in _PLAIN_LAYERS or is_plain_part
    if not is_plain or model.device.type != "cpu" or config.hidden_act != "silu":
        return False
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    bf16: bool = model.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bf16 or model.dtype == torch.float32


def _language_part(model: Any) -> Any:
    """Return the body of a model, without the tower of one that reads images."""
    return model.base_model.language_model if reads_images(model.config.to_dict()) else model.base_model


class FusedLayers:
    """Compute the output of the body of a model that passes ``can_fuse``: hidden states after the last norm."""

    def __init__(self, model: Any) -> None:
        """Take the weights out of ``model``; its parameters keep their shapes."""
        body = _language_part(model)
        self._rotary = body.rotary_emb
        self._layers = [_Layer(layer) for layer in body.layers]
        self._norm = _Norm(body.norm)
        products = {id(product.emptied): product for layer in self._layers for product in layer.products}
        # What loads a weight, by the name of the parameter that it was taken from.
        self.load: dict[str, Callable[[torch.Tensor], None]] = {
            name: products[id(weight)].load for name, weight in model.named_parameters() if id(weight) in products
        }

    def __call__(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        visual_pos_masks: torch.Tensor | None = None,
        deepstack_visual_embeds: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return the hidden states [B, T, H] of embedded tokens [B, T, H] at ``positions`` [1 or B, T] or [3, B, T].

        After the first layers, ``deepstack_visual_embeds`` are added where ``visual_pos_masks`` [B, T] is true.
        """
        cos, sin = self._rotary(inputs_embeds, positions)
        cos, sin = cos[:, :, None], sin[:, :, None, : sin.shape[-1] // 2]
        hidden, shape = inputs_embeds.flatten(0, 1), inputs_embeds.shape
        for layer, added in zip_longest(self._layers, deepstack_visual_embeds):
            hidden = layer.forward(hidden, shape[:2], cos, sin, step)
            if added is not None:
                assert visual_pos_masks is not None
                hidden[visual_pos_masks.flatten()] += added.to(hidden.dtype)
        return self._norm(hidden).view(shape)


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
        query, key, value = (x.transpose(1, 2) for x in (rotated(query, cos, sin), rotated(key, cos, sin), value))
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


# Tokens that a further pass must save. It reads all weights, which takes a CPU as long as computing about 25 tokens.
SAVED_BY_PREFIX = 64


class ModelRunner:
    """Run a decoder-only transformers model, and keep what its layers need of the tokens of each row.

    Plain attention is the fastest. A layer with a sliding window reads the whole row and hides tokens outside the
    window, attention that chooses its keys scores all of them, and recurrent layers prefill prompts of one length at
    once.
    """

    def __init__(self, model_path: str, dtype: torch.dtype, device: str, fp32_head: bool = False) -> None:
        """Load the model; with ``fp32_head`` its logits are computed in fp32 whatever its dtype is.

        Raises:
            ValueError: If some layers would be computed wrongly.
        """
        config = read_config(model_path)
        _check_layers(config, model_path)
        self.device = torch.device(device)
        # Any, because the wrappers around transformers' methods hide their types.
        model: Any = read_model(model_path, config, dtype, attention.NAME)
        self.model: Any = model.to(self.device).eval().requires_grad_(False)
        bound_time_steps(self.model)
        plain = config.to_dict()
        self.is_recurrent = has_recurrent_state(plain)
        self._is_sparse = model_type(plain) in SPARSE
        self._reads_images = reads_images(plain)
        if self._reads_images:
            from miles.models.images import vision_family

            vision_family(config.model_type).prepare(self.model.base_model)
        states = LayerStates(config.get_text_config()) if self.is_recurrent or self._is_sparse else None
        self.cache = KVCache(states)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        text = config.get_text_config()
        # Some types call the field otherwise in the dictionary.
        named = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
        longest, self.length_field = longest_generated(named | text.to_dict())
        self.max_length = math.inf if longest is None else longest
        self.eos_ids = end_token_ids(model_path)
        self._last_positions: torch.Tensor | None = None
        head = self.model.get_output_embeddings()
        head.register_forward_pre_hook(self._keep_last_positions)
        self._fp32_head = Fp32Head(head) if fp32_head else None
        self._fused = FusedLayers(self.model) if can_fuse(self.model) else None
        self._routers: Routers | None = None

    def prepare_experts(self) -> None:
        """Find the routers, so that passes can record the experts that they choose.

        Raises ``ValueError`` for a model whose routers are not known.
        """
        if self._routers is None:
            self._routers = Routers(self.model, "--use-rollout-routing-replay")

    @contextmanager
    def recording_experts(self) -> Iterator[Callable[[], np.ndarray]]:
        """Yield a function that returns the experts of the block's pass, [tokens of all rows, layers, k]."""
        assert self._routers is not None, "prepare_experts() comes first"
        with self._routers.recording():
            yield self._routers.take_numpy

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], first_row: int, images: Sequence[PromptImages | None] = ()
    ) -> torch.Tensor:
        """Run P whole prompts, and store them in row ``first_row`` and those after it.

        What all of them start with, such as a system prompt, is run once if that saves ``SAVED_BY_PREFIX`` tokens.

        Returns:
            The logits that follow each prompt, [P, vocab].
        """
        lengths = torch.tensor([len(p) for p in prompts])
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ids = ids.to(self.device)
        positions = torch.arange(width, device=self.device)
        self.cache.reserve(first_row + len(prompts), width)
        prefix = None
        shared = self._shared_start(prompts)
        if shared:
            prefix = PrefixStep()
            self._last_positions = torch.tensor([shared - 1], device=self.device)
            self._forward(ids[:1, :shared], positions[None, :shared], prefix)
        step = PrefillStep(self.cache, first_row, prefix)
        self._last_positions = (lengths - 1 - shared).to(self.device)
        states = None if self.cache.states is None else self.cache.states.fresh()
        mask = step.mask(width, self.device) if self._is_sparse else None
        if self._reads_images:
            from miles.models.images import tensors_of  # a text model reads none of it

            return self._forward_images(ids, step, [tensors_of(one) if one is not None else None for one in images])
        logits = self._forward(ids[:, shared:], positions[None, shared:], step, states, mask)
        if self.is_recurrent:
            assert self.cache.states is not None and states is not None
            assert len(set(map(len, prompts))) == 1, "padding would enter the states"
            self.cache.states.admit(states, first_row)
        return logits

    def _shared_start(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return how many tokens at the start of all prompts to run once; 0 if it saves too little.

        Only fused layers do: they have plain attention, which is all that steps with a prefix compute. Equal tokens may
        be of different images.
        """
        shared = 0 if self._fused is None or self._reads_images else common_start(prompts)
        return shared if shared * (len(prompts) - 1) >= SAVED_BY_PREFIX else 0

    @torch.inference_mode()
    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        width: int,
        images: Sequence[PromptImages | None] = (),
    ) -> torch.Tensor:
        """Run one token of each of rows 0 .. B - 1, at ``positions``; attention reads ``width`` tokens of each row.

        Returns:
            Logits [B, vocab].
        """
        at = torch.tensor(positions, device=self.device)
        self.cache.reserve(len(tokens), width)
        if self.device.type == "cpu":
            width = self.cache.attended(len(tokens), width)
        visible = torch.arange(width, device=self.device) <= at[:, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.device).masked_fill_(~visible, -torch.inf)
        step = DecodeStep(self.cache, torch.arange(len(tokens), device=self.device), at, mask[:, None, None])
        self._last_positions = None
        if self.cache.states is not None:
            self.cache.states.keep_rows(len(tokens))
        chosen_from = visible[:, None, None] if self._is_sparse else None
        ids = torch.tensor(tokens, device=self.device)[:, None]
        if self._reads_images:
            turned = at + torch.tensor([_offset(one) for one in images or [None] * len(tokens)], device=self.device)
            return self._forward_text({"inputs_embeds": self.model.get_input_embeddings()(ids)}, turned[:, None], step)
        return self._forward(ids, at[:, None], step, self.cache.states, chosen_from)

    @torch.inference_mode()
    def own_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, vocab] of transformers' own attention over one sequence."""
        self._last_positions = None
        self.model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self.model(
                input_ids=torch.tensor([tokens], device=self.device), use_cache=False
            ).logits[0]
        finally:
            self.model.set_attn_implementation(attention.NAME)
        return logits

    def load_weights(self, chunks: Iterable[WeightChunk]) -> None:
        """Copy every parameter in place, cast to the model's dtype.

        Experts may arrive one by one, as checkpoints store them, or one tensor per layer, as transformers keeps them.
        One name of tied tensors is enough.

        Raises:
            ValueError: Naming tensors that are unknown, misshapen or missing.
        """
        if self._fp32_head is not None:
            self._fp32_head.forget()
        targets: dict[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        arrived: dict[int, dict[int, int]] = {}  # per parameter: sizes that arrived, by address
        for chunk in chunks:
            by_name = {name: _target(name, targets) for name in chunk.tensors}
            parts = {name: part for name, (_, part) in by_name.items() if part is not None}
            _check_names_and_shapes(chunk.tensors, parts)
            with torch.no_grad():
                for name, tensor in chunk.tensors.items():
                    target, part = by_name[name]
                    assert part is not None
                    if self._fused is not None and name in self._fused.load:
                        self._fused.load[name](tensor)
                    else:
                        part.copy_(tensor)
                    arrived.setdefault(target, {})[part.data_ptr()] = part.numel()
        missing = [n for n, target in targets.items() if sum(arrived.get(id(target), {}).values()) < target.numel()]
        if missing:
            raise ValueError(
                f"weight update lacks {_listed(missing)}: send every parameter of the model in each update"
            )

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        step: Step,
        states: LayerStates | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the last token of each row. An indexer chooses from the keys of ``mask``."""
        if self._fused is not None:
            hidden = self._fused(self.model.get_input_embeddings()(ids), positions, step)
            fused_logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
            return fused_logits[:, -1]
        if states is not None:
            assert not isinstance(step, PrefixStep)
            states.step = step
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions.expand(ids.shape),
            past_key_values=states,
            use_cache=False,
            kv_step=step,
            logits_to_keep=0,
        )
        logits: torch.Tensor = output.logits
        return logits[:, -1]

    def _forward_images(self, ids: torch.Tensor, step: Step, images: Sequence[ImageTensors | None]) -> torch.Tensor:
        """Return the logits that follow prompts, padded in ``ids`` [P, T], with the features of their images."""
        from miles.models.images import joined, text_inputs, vision_family

        body = self.model.base_model
        family = vision_family(self.model.config.model_type)
        feature = torch.full(ids.shape, -1)
        axes = torch.arange(ids.shape[1]).repeat(3, len(ids), 1)
        first: dict[ImageTensors, int] = {}  # of each prompt's images: the first of their rows of features
        for number, (row, one) in enumerate(zip(ids.cpu().numpy(), images or [None] * len(ids), strict=True)):
            if one is None:
                continue
            start = first.setdefault(one, sum(sum(other.counts) for other in first))
            feature[number, torch.from_numpy(one.places(row))] = start + torch.arange(sum(one.counts))
            positions = one.positions(row)
            if positions is not None:
                axes[:, number] = torch.from_numpy(positions)
        features = family.features(body, joined(tuple(first), self.device)) if first else None
        inputs = text_inputs(body, ids, feature.to(self.device), features)
        has_axes = any(one.grids is not None for one in first)
        return self._forward_text(inputs, (axes if has_axes else axes[0]).to(self.device), step)

    def _forward_text(self, inputs: dict[str, Any], positions: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the logits of the last token of each row, by the language part of a model that reads images."""
        if self._fused is not None:
            hidden = self._fused(**inputs, positions=positions, step=step)
        else:
            body = self.model.base_model.language_model
            hidden = body(**inputs, position_ids=positions, use_cache=False, kv_step=step).last_hidden_state
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return logits[:, -1]

    def _keep_last_positions(self, _: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Cut hidden states [P, T, H] to each prompt's last token, before the output projection of a prefill."""
        if self._last_positions is None:
            return None
        hidden = args[0]
        return (hidden[torch.arange(len(hidden), device=hidden.device), self._last_positions][:, None],)


def _offset(images: PromptImages | None) -> int:
    """Return how far rotary positions behind a prompt are from the indices of its tokens."""
    if images is None:
        return 0
    from miles.models.images import tensors_of

    return tensors_of(images).offset


def common_start(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts start with, at most all but the last of the shortest."""
    in_order = sorted(map(tuple, prompts))
    first, last = in_order[0], in_order[-1]  # every other prompt is between them, so it starts as they do
    longest = min(len(p) for p in prompts) - 1
    return next((i for i in range(longest) if first[i] != last[i]), longest)


def _check_layers(config: PreTrainedConfig, model_path: str) -> None:
    if config.is_encoder_decoder:
        raise ValueError(
            f"--hf-checkpoint {model_path}: the model has an encoder and a decoder; --rollout-engine torch runs "
            "decoder-only models: choose another model"
        )
    if why := why_not_generated(config.to_dict()):
        raise ValueError(f"--hf-checkpoint {model_path}: {'; '.join(why)}")


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _target(name: str, targets: dict[str, torch.Tensor]) -> tuple[int, torch.Tensor | None]:
    """Return the id of the parameter that tensor ``name`` belongs to, and its part of it; None for an unknown name."""
    expert = _EXPERT.fullmatch(name)
    if name in targets or expert is None:
        return id(targets.get(name)), targets.get(name)
    layer, number, kind = expert[1], int(expert[2]), expert[3]
    whole = targets.get(f"{layer}.down_proj" if kind == "down" else f"{layer}.gate_up_proj")
    if whole is None or number >= len(whole):
        return id(None), None
    part = whole.detach()[number]  # gate_up [2 I, H]: the gate's rows first
    if kind != "down":
        part = part.chunk(2)[kind == "up"]
    return id(whole), part


def _check_names_and_shapes(tensors: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    unknown = [name for name in tensors if name not in targets]
    if unknown:
        raise ValueError(f"weight update has {_listed(unknown)}, which the model does not have: use Hugging Face names")
    for name, tensor in tensors.items():
        if tensor.shape != targets[name].shape:
            raise ValueError(
                f"weight update has {name} of shape {tuple(tensor.shape)}, the model's is "
                f"{tuple(targets[name].shape)}: send full, unsharded tensors"
            )


def _listed(names: list[str]) -> str:
    """Return up to eight names, and how many more there are."""
    text = ", ".join(names[:8])
    return text if len(names) <= 8 else f"{text} and {len(names) - 8} more"


class Fp32Head:
    """Replaces a head's product by the trainer's (``head_logits``), with the same weights.

    On a CPU the fp32 copy of the weights is kept from one decoding step to the next, because copying takes as long as
    multiplying.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        """Replace ``head.forward``."""
        self._head = head
        self._copy: torch.Tensor | None = None
        head.forward = self._logits  # type: ignore[assignment, method-assign]

    def forget(self) -> None:
        """Drop the copy, since the weights change."""
        self._copy = None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [..., H], fp32 [..., V]."""
        weight, bias, rows = self._head.weight, self._head.bias, hidden.flatten(0, -2)
        if hidden.is_cuda:
            logits = head_logits(rows, weight, bias, fp32=True)
        else:
            if self._copy is None:
                self._copy = weight.float()
            logits = head_logits(rows.float(), self._copy, None if bias is None else bias.float())
        return logits.view(*hidden.shape[:-1], -1)
