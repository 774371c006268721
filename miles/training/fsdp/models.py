"""A Hugging Face language model as the trainer sees it: tokens in; log-probs and entropy, or values, out.

``Policy`` and ``ValueModel`` each have the ``scorer`` that the runner hands to the trainer (training/backend.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from miles.models.packing import SPARSE, longest_trained, model_type, reads_images
from miles.models.reading import attention_of, choose_experts, class_of, read_config, read_model
from miles.models.routers import Routers
from miles.objective.output import PolicyScores
from miles.objective.token_log_probs import chunked_log_probs
from miles.training.backend import PolicyScorer, Scorer, ValueScorer
from miles.training.fsdp.plain_layers import compute_with_few_operations
from miles.training.packed_attention import NAME, PackedLayout, PackedRows
from miles.types.train_batch import MicroBatch

if TYPE_CHECKING:
    from miles.training.fsdp.vision_tower import VisionTower


# Layers with recurrent state (linear attention, Mamba) on packed samples: each sample begins with an empty state.
#
# Such a layer is a causal convolution over a few tokens and a scan over all of them, and both would pass from one
# packed sample to the next. The layer therefore gets the rows that attention gets (packed_attention.py): each sample is
# a row, a shared token is in the row of each of its samples, and padding is to the right, which a causal layer does not
# see. All other layers keep the packed tokens.
#
# That needs nothing of a layer but that it is causal, so the kernels of fla, causal-conv1d and mamba-ssm on a GPU are
# called as transformers' own code on CPU is: with rows that begin at their first token.


def reset_states_between_samples(model: nn.Module) -> None:
    """Make every layer of ``model`` with recurrent state compute packed samples one by one, in place.

    In transformers it is a module with its own causal convolution. One whose decoder layer does not hand keyword
    arguments on to it (jamba, lfm2) is not told the layout, and the check at the start of a run refuses the model.
    """
    for module in model.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            module.forward = partial(_by_sample, module.forward)


def _by_sample(
    forward: Callable[..., torch.Tensor], *args: Any, packed: PackedLayout | None = None, **kwargs: Any
) -> torch.Tensor:
    """Compute a layer on hidden states [1, T, hidden] of packed samples; same shape.

    Rows of padded samples, and whatever comes without a layout, are computed unchanged.
    """
    if packed is None or packed.padded:
        return forward(*args, **kwargs)
    assert packed.context.size == 1, "validate() refuses ranks that share the sequences of such a model"
    assert kwargs.get("attention_mask") is None
    hidden_states = args[0] if args else kwargs.pop("hidden_states")
    tokens = hidden_states[0]
    out = torch.zeros_like(tokens)
    for rows in packed.rows:
        # A token that several samples share is computed in the row of each; one copy is kept.
        out = rows.put_from_keys(forward(rows.of_keys(tokens), *args[1:], **kwargs), out)
    return out.unsqueeze(0)


# Sparse attention (deepseek_v32, glm_moe_dsa) on packed or padded samples: each sample chooses among its own keys.
#
# In such a layer an indexer scores the keys that a query may see, and the query attends to the ``index_topk`` best of
# them. Some layers reuse the choice of the layer before. transformers' code scores and chooses within the rows of a
# batch, so the layer gets samples as rows, as layers with recurrent state do, and the mask that it expects. Rows of at
# most ``index_topk`` tokens choose every key, so their indexer is not run and attention is dense.
#
# The choice has no gradient, in transformers as well: the weights of the indexer are frozen.


INDEXER = "indexer"  # its name in a layer


def choose_keys_within_samples(model: PreTrainedModel) -> None:
    """Make every layer of ``model`` with sparse attention choose keys within a sample, in place."""
    if model_type(model.config.to_dict()) not in SPARSE:
        return
    for module in model.modules():
        if not hasattr(module, INDEXER):
            continue
        module.forward = partial(_in_rows, module.forward, model.config.index_topk)
        if isinstance(module.indexer, nn.Module):  # None in a layer that reuses a choice
            module.indexer.forward = partial(_choose, module.indexer.forward)
            module.indexer.requires_grad_(False)


def _in_rows(
    forward: Callable[..., tuple[Any, ...]], topk: int, *, packed: PackedLayout | None = None, **kwargs: Any
) -> tuple[Any, ...]:
    """Compute a layer on hidden states [1, T, hidden] of packed samples, or [rows, S, hidden] of padded ones.

    Input without a layout is computed unchanged. The result equals the result of transformers' layer; the keys that a
    layer chooses, which a later layer may reuse, are one tensor per group of rows.
    """
    if packed is None:
        return forward(**kwargs)
    hidden_states, positions = kwargs.pop("hidden_states"), kwargs.pop("position_embeddings")
    reused = kwargs.pop("prev_topk_indices", None)
    del kwargs["attention_mask"]
    rows_of = _rows_of(packed, hidden_states)
    out = torch.zeros_like(hidden_states)
    chosen: list[torch.Tensor] = []
    for number, (to_cells, from_cells) in enumerate(rows_of):
        if reused is not None:
            kwargs["prev_topk_indices"] = reused[number]
        rows = to_cells(hidden_states)
        computed, _weights, *indices = forward(
            hidden_states=rows,
            position_embeddings=tuple(to_cells(part) for part in positions),
            attention_mask=_causal(rows.shape[1], topk, rows.device),
            packed=PackedLayout((), packed.context, padded=True),
            **kwargs,
        )
        out = from_cells(out, computed)
        chosen += indices
    return (out, None, tuple(chosen)) if chosen else (out, None)


def _rows_of(
    packed: PackedLayout, hidden_states: torch.Tensor
) -> list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    """Return two functions per group of rows: one lays tokens out in it, one puts its results among all results."""
    if packed.padded:
        return [(lambda tokens: tokens.expand(len(hidden_states), -1, -1), lambda _, computed: computed)]
    assert packed.context.size == 1, "validate() refuses ranks that share the sequences of such a model"

    def to_cells(rows: PackedRows, tokens: torch.Tensor) -> torch.Tensor:
        return rows.of_keys(tokens[0])

    def from_cells(rows: PackedRows, out: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        return rows.put_from_keys(computed, out[0])[None]

    return [(partial(to_cells, rows), partial(from_cells, rows)) for rows in packed.rows]


def _causal(length: int, topk: int, device: torch.device) -> torch.Tensor:
    """Return which keys a query may choose, bool [1, 1, length, length]; empty if it chooses all of them."""
    size = length if length > topk else 0
    return torch.ones(1, 1, size, size, dtype=torch.bool, device=device).tril()


def _choose(
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    query: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    *args: Any,
    **named: Any,
) -> torch.Tensor:
    """Return the keys that each query chooses, int32 [rows, S, topk]; of no key if it chooses all of them."""
    if attention_mask.numel() == 0:
        return hidden_states.new_empty(*hidden_states.shape[:2], 0, dtype=torch.int32)
    return forward(hidden_states, query, positions, attention_mask, *args, **named)


class LossCanary(nn.Module):
    """The scalar whose gradient is the weight of all tokens; sharded and reduced like every parameter, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> torch.Tensor:
        """Return the scalar."""
        return self.weight.sum()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedModule(nn.Module, Generic[Scorer]):
    """A decoder and the computation on its hidden states; ``shard_model`` spreads it over the ranks."""

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__()
        self.language_model = language_model
        self._longest = longest_trained(language_model.config.get_text_config().to_dict())
        self.tower = _vision_tower(language_model) if reads_images(language_model.config.to_dict()) else None

    def hidden_states(self, micro: MicroBatch) -> torch.Tensor:
        """Return the decoder's hidden states of the tokens, [T, hidden].

        Raises:
            ValueError: A sample is so long that it would change the positions of the others.
        """
        longest, field = self._longest or (math.inf, "")
        if max(micro.total_lengths) > longest:
            raise ValueError(
                f"a sample has {max(micro.total_lengths)} tokens, and beyond the model's {field} {longest} its rotary "
                "embedding has other frequencies for all samples of a micro-batch, so --train-backend fsdp does not "
                f"train it; give --rollout-max-context-len {longest}, or choose another model"
            )
        ids, positions = micro.input_ids.view(micro.rows, -1), micro.position_ids.view(micro.rows, -1)
        body: Any = self.language_model.base_model
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.tower is not None:
            body = body.language_model
            inputs = self.tower.inputs(ids, micro.images)
            if micro.images is not None and micro.images.positions is not None:
                positions = micro.images.positions.view(3, micro.rows, -1)
        states: torch.Tensor = body(
            **inputs, position_ids=positions, use_cache=False, packed=PackedLayout.of(micro)
        ).last_hidden_state
        return states.flatten(0, 1)

    @property
    def in_fp32(self) -> nn.Module:
        """The part that is computed in fp32 whatever the dtype of the rest."""
        raise NotImplementedError

    def scorer(self, micro: MicroBatch, watched: bool = False) -> Scorer:
        """Return the forward pass over ``micro``, to be called once; the canary is in the graph if ``watched``."""
        raise NotImplementedError

    def take_loss_mass(self) -> torch.Tensor | None:
        """As ``TrainedModel.take_loss_mass``; None for a model without a canary."""
        return None


def _vision_tower(language_model: PreTrainedModel) -> VisionTower:
    from miles.training.fsdp.vision_tower import VisionTower  # a text model reads none of it

    return VisionTower(language_model.base_model)


class ValueModel(ShardedModule[ValueScorer]):
    """The critic: the decoder of a causal language model, with one number per token instead of the vocabulary.

    The head is fp32, and starts at 0: a critic that knows nothing predicts no reward.
    """

    def __init__(self, language_model: PreTrainedModel) -> None:
        super().__init__(language_model)
        self.value_head = nn.Linear(language_model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    @property
    def in_fp32(self) -> nn.Module:
        """The head."""
        return self.value_head

    def scorer(self, micro: MicroBatch, watched: bool = False) -> ValueScorer:
        """Return the forward pass over ``micro``."""
        assert not watched, "the critic's loss has no canary"
        return partial(self, micro)

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """Return the value of the state where each token of ``micro.targets`` is chosen, fp32 [R]."""
        values: torch.Tensor = self.value_head(self.hidden_states(micro)[micro.logit_index])
        return values[:, 0]


class Policy(ShardedModule[PolicyScorer]):
    """The language model. Only response positions reach its head, in chunks (objective/token_log_probs.py)."""

    routers: Routers | None = None  # what gives its layers the experts of a micro-batch

    def __init__(
        self, language_model: PreTrainedModel, temperature: float, chunk_size: int, fp32_head: bool = False
    ) -> None:
        super().__init__(language_model)
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.fp32_head = fp32_head
        self.canary = LossCanary()

    @property
    def in_fp32(self) -> nn.Module:
        """The canary."""
        return self.canary

    def scorer(self, micro: MicroBatch, watched: bool = False) -> PolicyScorer:
        """Return the forward pass over ``micro``."""
        return partial(self, micro, watched)

    def take_loss_mass(self) -> torch.Tensor | None:
        """Return this rank's part of the canary's gradient, and clear it; None if the step was not watched."""
        weight = self.canary.weight
        gradient, weight.grad = weight.grad, None
        return None if gradient is None else local_part(gradient).float().sum()

    def forward(self, micro: MicroBatch, watched: bool, with_entropy: bool, sharpness: float = 1.0) -> PolicyScores:
        """Return log-probs of ``micro.targets`` under softmax(logits sharpness / temperature), entropy if asked.

        If the micro-batch has supports, the softmax is over these. If it has experts, the layers use these.

        The canary stays out of the graph of steps that are not watched: its gradient would enter norm and optimizer.
        """
        if self.routers is not None:
            self.routers.replay(micro.experts)
        hidden = self.hidden_states(micro)
        head = self.language_model.get_output_embeddings()
        shared = micro.shared_logits
        log_probs, entropy = chunked_log_probs(
            hidden[micro.logit_index if shared is None else shared.tokens],
            head.weight,
            micro.targets,
            temperature=(self.temperature or 1.0) / sharpness,
            chunk_size=self.chunk_size,
            bias=head.bias,
            with_entropy=with_entropy,
            fp32=self.fp32_head,
            support=micro.support,
            shared=shared,
        )
        canary = self.canary() if watched else None  # on every rank, as its weight is gathered
        return PolicyScores(log_probs, entropy, canary)


def load_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load weights and configuration. Raises ``ValueError`` if the files lack some of the weights."""
    return _prepared(read_model(path, read_config(path), dtype, NAME))


def build_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the same model from its configuration alone. Its weights are random."""
    config = read_config(path)
    model = class_of(config).from_config(config, dtype=dtype, attn_implementation=attention_of(config, NAME))
    choose_experts(model)
    return _prepared(model)


def _prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Choose how layers with recurrent state and sparse attention are computed, and cast all weights alike.

    Transformers keeps some of them in fp32; FSDP shards parameters of one dtype.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(model.dtype)
    _compute_without_noise(model)
    compute_with_few_operations(model)
    reset_states_between_samples(model)
    choose_keys_within_samples(model)
    return model


def _compute_without_noise(model: nn.Module) -> None:
    """Switch off dropout and the jitter of routers, which some configurations ask for in training (seed_oss: 0.1).

    The loss compares log-probs of this pass with those that the engine, the reference and the policy itself gave
    without noise, and a token that several samples share is computed once. transformers' layers copy the rates from
    the configuration when they are built; it stays unchanged, for the export. Types whose layers read it later are
    found by packing_check.py.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


class NothingToReduce(ReduceScatter):
    """The reduction of gradients on one rank: the input is the output.

    FSDP2 allocates both, and copies one to the other (torch 2.13 ``_fsdp_collectives.py``, ``foreach_reduce``). A copy
    of a tensor to itself does nothing, so both are the same: the second allocation of each pair returns the first.
    FSDP2 may drop it while its reduction stream still reads it. ``record_stream`` keeps the allocator from reusing the
    memory on another stream until then.
    """

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new tensor, and on the next call the same one."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        output, self._input = self._input, None
        assert tuple(output.shape) == tuple(size) and output.dtype == dtype, (
            f"torch {torch.__version__} does not allocate gradients in pairs of one shape and dtype, as 2.13 does "
            "(foreach_reduce); install torch 2.13, and report this if it is installed"
        )
        if output.is_cuda:
            output.record_stream(torch.cuda.current_stream(output.device))
        return output

    def __call__(self, *_: object, **__: object) -> None:
        """Refuse: there is nobody to exchange with."""
        raise AssertionError("one rank has nothing to reduce")


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name of the list of layers in a model's body (``layers`` in most, ``h`` or ``blocks``), and the list.

    It is the first list of the body: others, such as lists of experts, are inside the layers.
    """
    within = "language_model." if reads_images(model.config.to_dict()) else ""  # the tower has layers too
    modules = model.base_model.named_modules()
    lists = ((name, module) for name, module in modules if isinstance(module, nn.ModuleList))
    return next((name, layers) for name, layers in lists if name.startswith(within))


def shard_model(
    model: ShardedModule[Scorer], mesh: DeviceMesh, compute_dtype: torch.dtype, checkpointing: bool
) -> None:
    """Shard every decoder layer and the rest over ``mesh``, in place; gradients are reduced in fp32, **as sums**.

    ``fully_shard`` moves the tensors that it shards to the mesh's device, so that no device ever holds more than its
    part and one whole layer (torch 2.13 ``_fully_shard/_fsdp_init.py``, ``_move_states_to_device``).

    FSDP2 divides by the world size after reducing (``FSDPModule.set_gradient_divide_factor``); a factor of 1 cancels
    that. Gloo cannot reduce with a pre-multiplied factor, hence the forced sum. No other code of this backend knows
    about averaging (docs/loss-aggregation.md, "gradients are sums").
    """
    if checkpointing:
        model.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    reshard = mesh.size() > 1
    # One rank adds nothing up, so its gradients become fp32 after they were joined: joining is slow if it converts.
    reduced = torch.float32 if reshard else compute_dtype
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    for layer in decoder_layers(model.language_model)[1]:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(model.in_fp32, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
        else:  # without a factor: a pass over all gradients would divide them by 1
            module.set_custom_reduce_scatter(NothingToReduce())
            module.set_reshard_after_backward(False, recurse=False)  # it would copy them again; the runner frees them
