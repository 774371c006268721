"""The shape of a model as Megatron-Bridge gives it. What our layers do not compute is refused by its name.

A provider of Megatron-Bridge is a ``TransformerConfig`` with some fields of the model. A field that is not at its
default is either passed on (``PASSED_ON``), read from the Hugging Face config instead (``FROM_CONFIG``), or does not
change the model's computation (``WITHOUT_EFFECT``). Any other field is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.activations import squared_relu
from transformers import PretrainedConfig

from miles.base.attributes import set_within
from miles.models.base import EXPERT_FIELDS, LAYER_FIELDS
from miles.models.registry import BRIDGED, check_bridged, megatron_shape, vocabulary_shape
from miles.training.megatron.hf_files import HuggingFaceWeights
from miles.training.megatron.layers import inverse_frequencies
from miles.training.megatron.model.adapter import LinearLayer
from miles.training.megatron.moe import BalancedRouter
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.types.groups import gather_objects

PASSED_ON = (*LAYER_FIELDS, "activation_func")
FROM_CONFIG = (
    "vocab_size",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    # The frequencies equal transformers' frequencies for the same config (layers.py).
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)
WITHOUT_EFFECT = (
    # of training, set by flags of miles
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "seq_length",
    # how numbers are stored, drawn and reduced
    "autocast_dtype",
    "bf16",
    "fp16",
    "params_dtype",
    "pipeline_dtype",
    "moe_router_dtype",
    "attention_softmax_in_fp32",
    "init_method_std",
    # which kernels compute them
    "apply_rope_fusion",
    "cp_comm_type",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_token_dispatcher_type",
    "persist_layer_norm",
    # of the way Megatron-Bridge builds a model
    "hf_model_id",
    "make_vocab_size_divisible_by",
)
NORMS = (("RMSNorm", False), ("LayerNorm", True))  # as layers.py has them
MLPS = ((F.silu, True), (squared_relu, False))


def bridge_shape(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig``, as ``megatron_shape`` does for the models that miles converts.

    Raises ``ValueError`` naming the fields that Megatron-Bridge sets and our layers do not compute, and for a model
    that miles converts, the fields that the two read differently.
    """
    check_bridged(config.to_dict())
    inverse_frequencies(config)  # refuses kinds of rotary embedding that are not computed
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    check_provider(provider, config)
    shape = {name: getattr(provider, name) for name in PASSED_ON}
    shape["num_query_groups"] = shape["num_query_groups"] or shape["num_attention_heads"]
    shape["kv_channels"] = shape["kv_channels"] or shape["hidden_size"] // shape["num_attention_heads"]
    if provider.num_moe_experts:
        shape |= {name: getattr(provider, name) for name in EXPERT_FIELDS}
        every = shape["moe_layer_freq"]
        if isinstance(every, int):
            shape["moe_layer_freq"] = [int(layer % every == 0) for layer in range(shape["num_layers"])]
    if config.model_type not in BRIDGED:  # one that miles reads itself
        for name, value in megatron_shape(config.to_dict()).items():
            if shape.get(name) != value:
                raise _refusal(name, shape.get(name), f"miles reads {value} in the model's config")
    return shape


def check_provider(provider: Any, config: PretrainedConfig) -> None:
    """Raise ``ValueError`` naming what ``provider`` states of the model and our layers do not compute."""
    _check_kind(provider)
    _check_model(provider, config)


def _check_kind(provider: Any) -> None:
    """Check that it builds Megatron's plain GPT, and sets no field outside the lists above."""
    if getattr(type(provider), "provide", None) is not GPTModelProvider.provide:
        raise _refusal("provider", type(provider).__name__, "it builds the model in its own way")
    known = (*PASSED_ON, *EXPERT_FIELDS, *FROM_CONFIG, *WITHOUT_EFFECT)
    for field in fields(GPTModelProvider):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(provider, field.name)
        means_none = field.name == "mtp_num_layers" and not value  # 0 as well
        if field.name not in known and value != default and not means_none:
            raise _refusal(field.name, value, "--train-backend megatron does not compute it")


def _check_model(provider: Any, config: PretrainedConfig) -> None:
    """Check that the values of known fields are those that were compared with transformers."""
    vocabulary = vocabulary_shape(config.to_dict())
    tied = not vocabulary["untie_embeddings_and_output_weights"]
    share = vocabulary["rotary_percent"]
    rules: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("position_embedding_type", lambda v: v == "rope", "positions are rotary"),
        ("rotary_percent", lambda v: v == share, f"its rope_parameters say that {share} of a head is rotated"),
        ("vocab_size", lambda v: v == vocabulary["vocab_size"], "the model's config has another one"),
        ("share_embeddings_and_output_weights", lambda v: v == tied, "the model's config states otherwise"),
        ("add_bias_linear", lambda v: not v, "only matrices without bias are computed"),
        ("hidden_dropout", lambda v: not v, "dropout is not computed"),
        ("attention_dropout", lambda v: not v, "dropout is not computed"),
        (
            "normalization",
            lambda v: (v, provider.layernorm_zero_centered_gamma) in NORMS,
            f"with layernorm_zero_centered_gamma {provider.layernorm_zero_centered_gamma} it is not computed",
        ),
        (
            "activation_func",
            lambda v: (v, provider.gated_linear_unit) in MLPS,
            f"with gated_linear_unit {provider.gated_linear_unit} it is not computed",
        ),
    )
    for name, is_computed, why in rules:
        value = getattr(provider, name)
        if not is_computed(value):
            raise _refusal(name, value, why)


def _refusal(name: str, value: Any, why: str) -> ValueError:
    label = getattr(value, "__name__", value)
    return ValueError(
        f"--megatron-to-hf-mode bridge: Megatron-Bridge gives the model {name} {label}, and {why}; "
        "choose another model, or --train-backend fsdp for others"
    )


# ``--megatron-to-hf-mode bridge``: names, shape and weights by Megatron-Bridge; layers and losses are miles' own.
#
# Megatron-Bridge has a mapping for each parameter: the Hugging Face tensors that it holds, and how they are cut over
# ranks and gathered again. Here too, both directions process parameter by parameter. Megatron-Bridge logs and skips a
# parameter without a mapping and a mapping without a tensor. Here each of these is an error, and so is a tensor of the
# checkpoint that no parameter reads.


# Every rank has all of the router. Megatron-Bridge decides by a module's class, and does not know this one.
AutoMapping.register_module_type(BalancedRouter.__name__, "replicated")
HEAD = "output_layer.weight"
NOT_LEARNED = "rotary_emb.inv_freq"  # buffers that older checkpoints have


class BridgeConverter:
    """``WeightConverter`` by Megatron-Bridge. Both directions are collective."""

    def __init__(self, config: PretrainedConfig, weights: HuggingFaceWeights, ranks: Ranks) -> None:
        self.shape = bridge_shape(config)
        self.ranks = ranks
        self._config = config
        self._weights = weights
        # Megatron-Bridge finds its mappings by it; weights are read here.
        self._auto = AutoBridge.from_hf_config(config)

    def shape_of(self, config: PretrainedConfig) -> dict[str, Any]:
        """Return the shape of another model. Raises ``ValueError`` for one that would not be computed correctly."""
        return bridge_shape(config)

    @torch.no_grad()
    def load(self, model: PolicyModel, weights: HuggingFaceWeights) -> None:
        """Fill the parameters of ``model``, in their dtype. Collective.

        Raises ``ValueError`` for a parameter that would not be filled, and for a tensor that would not be read.
        """
        if self._config.tie_word_embeddings:
            weights.check_head_is_embedding()
        bridge, tasks = self._tasks(model, weights)
        self._check_complete(bridge, model, tasks, weights)
        tensors = _Tensors(weights)
        for task in tasks:
            if task.megatron_module is not None:  # of this rank
                whole = bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, tensors)
                task.param_weight.copy_(task.mapping.hf_to_megatron(whole, task.megatron_module))
        bridge._broadcast_shared_embeddings([model])  # to the last stage, of a tied model

    def export(
        self, model: PolicyModel, value: Callable[[torch.nn.Parameter], torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by Hugging Face name, in the same order on every rank; a tied head once. Collective."""
        bridge, tasks = self._tasks(model, self._weights)
        streamed = bridge.stream_weights_megatron_to_hf(
            [model],
            SimpleNamespace(config=self._config, state=_Tensors(self._weights)),
            cpu=False,
            show_progress=False,
            conversion_tasks=(_with_value(task, value, dtype) for task in tasks),  # one by one
            merge_adapter_weights=False,
        )
        head = bridge.mapping_registry().megatron_to_hf_lookup(HEAD).hf_param
        rows = model.tokens_in_vocabulary
        for name, tensor in streamed:
            if name == head and self._config.tie_word_embeddings:
                continue  # some checkpoints contain it twice
            is_padded = tensor.dim() == 2 and len(tensor) > rows and self._weights.shape(name)[0] == rows
            yield name, tensor[:rows] if is_padded else tensor  # the vocabulary, to a multiple of the ranks

    def linear_layers(self, model: PolicyModel) -> list[LinearLayer]:
        """Raise ``ValueError``: Megatron-Bridge names layers otherwise than adapters do."""
        raise ValueError("--megatron-to-hf-mode bridge: names no layers for an adapter; use raw with --lora-rank")

    def _tasks(self, model: PolicyModel, weights: HuggingFaceWeights) -> tuple[Any, list[Any]]:
        """Return a bridge and its task for each parameter of the whole model, in the same order on all ranks.

        The bridge is a new one each time, because it keeps the names of the first model that it sees.
        """
        bridge = self._auto._model_bridge
        model.config.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
        with set_within(model, **dict.fromkeys(model.NOT_IN_CHECKPOINT)):  # it has no mapping for them
            tasks = bridge.build_conversion_tasks(
                SimpleNamespace(config=self._config, state=_Tensors(weights)), [model]
            )
        return bridge, [task for task in tasks if task is not None]

    def _check_complete(self, bridge: Any, model: PolicyModel, tasks: list[Any], weights: HuggingFaceWeights) -> None:
        """Raise ``ValueError`` for a parameter that would not be filled, and for a tensor that would not be read."""
        filled = {id(task.param_weight) for task in tasks if task.megatron_module is not None}
        for name, parameter in model.named_parameters():
            is_tied = name == HEAD and model.share_embeddings_and_output_weights
            if name not in model.NOT_IN_CHECKPOINT and not is_tied and id(parameter) not in filled:
                raise ValueError(
                    f"--megatron-to-hf-mode bridge: Megatron-Bridge fills {name} from no tensor of "
                    f"{weights.path}; check that the checkpoint is complete, or choose another model"
                )
        read = {name for task in tasks for name in _names(task.mapping.hf_param)}
        of_head = _names(bridge.mapping_registry().megatron_to_hf_lookup(HEAD).hf_param)
        read = read.union(*gather_objects(read, self.ranks.ep), of_head)
        for name in weights.names:
            if name not in read and not name.endswith(NOT_LEARNED):
                raise ValueError(
                    f"--megatron-to-hf-mode bridge: {weights.path} has {name}, which fills no parameter, "
                    "so the model would differ from the checkpoint's; choose another model"
                )


def _names(hf_param: str | dict[str, str]) -> list[str]:
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def _with_value(task: Any, value: Callable[[torch.nn.Parameter], torch.Tensor], dtype: torch.dtype) -> Any:
    if task.param_weight is None:
        return task
    return replace(task, param_weight=value(task.param_weight).detach().to(dtype).contiguous())


class _Tensors(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors in the interface that Megatron-Bridge expects; each is read when it is accessed."""

    def __init__(self, weights: HuggingFaceWeights) -> None:
        self._weights = weights
        self.source = self  # where Megatron-Bridge looks for all names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._weights.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.names)

    def __len__(self) -> int:
        return len(self._weights.names)

    def get_all_keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self)
