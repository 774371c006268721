"""``--megatron-to-hf-mode bridge``: names, shape and weights by Megatron-Bridge; layers and losses are miles' own.

Megatron-Bridge has a mapping for each parameter: the Hugging Face tensors that it holds, and how they are cut over
ranks and gathered again. Here too, both directions process one parameter at a time. Megatron-Bridge logs and skips a
parameter without a mapping and a mapping without a tensor. Here each of these is an error, and so is a tensor of the
checkpoint that no parameter reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from transformers import PretrainedConfig

from miles.training.megatron.model.adapter import LinearLayer
from miles.training.megatron.model.policy_model import PolicyModel
from miles.training.megatron.moe.router import BalancedRouter
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.weights.bridge_shape import bridge_shape
from miles.training.megatron.weights.hf_files import HuggingFaceWeights

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
            _Checkpoint(self._config, _Tensors(self._weights)),
            cpu=False,
            show_progress=False,
            conversion_tasks=(_with_value(task, value, dtype) for task in tasks),  # one at a time
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
        """Raise ``ValueError``: Megatron-Bridge's names of layers are not those of adapters."""
        raise ValueError("--megatron-to-hf-mode bridge: names no layers for an adapter; use raw with --lora-rank")

    def _tasks(self, model: PolicyModel, weights: HuggingFaceWeights) -> tuple[Any, list[Any]]:
        """Return a bridge and its task for each parameter of the whole model, in the same order on all ranks.

        The bridge is a new one each time, because it keeps the names of the first model that it sees.
        """
        bridge = self._auto._model_bridge
        model.config.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
        with _hidden(model, model.NOT_IN_CHECKPOINT):
            tasks = bridge.build_conversion_tasks(_Checkpoint(self._config, _Tensors(weights)), [model])
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
        of_experts: list[set[str]] = [set() for _ in range(self.ranks.ep.size())]
        dist.all_gather_object(of_experts, read, group=self.ranks.ep)
        read = read.union(*of_experts, _names(bridge.mapping_registry().megatron_to_hf_lookup(HEAD).hf_param))
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


@contextmanager
def _hidden(model: PolicyModel, names: tuple[str, ...]) -> Iterator[None]:
    """Remove the parameters ``names`` from the model within the context."""
    kept = dict(model._parameters)
    for name in names:
        model._parameters.pop(name, None)
    try:
        yield
    finally:
        model._parameters.update(kept)


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


@dataclass(frozen=True)
class _Checkpoint:
    """A pretrained model, as far as Megatron-Bridge reads it."""

    config: PretrainedConfig
    state: _Tensors
