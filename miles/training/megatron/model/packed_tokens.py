"""Takes the layout of a micro-batch, packed or padded, through Megatron's model to attention and rotary embedding.

Megatron passes ``packed_seq_params`` to both, so the layout travels in it. Megatron's own packed format (``thd``)
describes consecutive sequences by cumulative lengths, which cannot express samples that share tokens. So Megatron
sees one sequence of T tokens (``sbhd``), and ``PackedTokens`` knows which tokens belong to which sample. Padded samples
are B sequences of S tokens to Megatron. Its activations have the sequence first: [S, B, hidden].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.training.megatron.versions import inputs_of_head, mtp_layer_name, recomputed_function
from miles.training.packed_attention import PackedLayout, packed_attention
from miles.types.groups import ContextGroup
from miles.types.parallel import zigzag_positions
from miles.types.train_batch import MicroBatch, TrainBatch

if TYPE_CHECKING:
    from miles.training.megatron.moe import AuxiliaryStep, MicroBatchExperts, RoutedTokens


@dataclass
class PackedTokens(PackedSeqParams):
    """The layout of a micro-batch. Of the parent's fields only ``qkv_format`` is set.

    The last ``padding`` tokens belong to no sample, and attention leaves them out. If packed, B is 1 and S is T plus
    ``padding``.
    """

    layout: PackedLayout | None = None
    input_ids: torch.Tensor | None = None  # int64 [B, S], of the tokens on this rank
    position_ids: torch.Tensor | None = None  # int64 [B, S]
    padding: int = 0
    auxiliary: AuxiliaryStep | None = None  # in passes that train on auxiliary losses
    routed: RoutedTokens | None = None  # for the routers
    ahead: NextTokens | None = None  # for the heads of multi-token prediction
    experts: MicroBatchExperts | None = None  # the routers' choice, if it was made before

    @property
    def shape(self) -> tuple[int, int]:
        """B and S, rows and tokens per row."""
        assert self.input_ids is not None
        rows, length = self.input_ids.shape
        return rows, length

    @classmethod
    def of(cls, micro: MicroBatch, multiple: int) -> PackedTokens:
        """Build the layout that every layer uses. S is padded to a multiple of ``multiple``, which rows already are."""
        padding = -len(micro.input_ids) % multiple
        assert not (micro.padded and padding)
        return cls(
            qkv_format="sbhd",
            layout=PackedLayout.of(micro),
            input_ids=torch.nn.functional.pad(micro.input_ids, (0, padding)).view(micro.rows, -1),
            position_ids=torch.nn.functional.pad(micro.position_ids, (0, padding)).view(micro.rows, -1),
            padding=padding,
        )


def tokens_at(activations: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the activations [R, H] of tokens ``index`` [R], counted row by row as in ``MicroBatch``.

    Args:
        activations: [S, B, H].
        index: int64 [R].
    """
    length = len(activations)
    return activations[index % length, index // length]


class PackedCoreAttention(MegatronModule):
    """Computes Megatron's ``core_attention`` by ``packed_attention``, on this rank's heads."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert config.kv_channels is not None and config.attention_dropout == 0.0
        self.scaling = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> torch.Tensor:
        """Return the attention output [S, B, heads * D].

        Args:
            query: [S, B, heads, D].
            key: [S, B, kv_heads, D].
            value: [S, B, kv_heads, D].
            attention_mask: Not read; the layout states what each token sees.
            packed_seq_params: The layout.
        """
        assert packed_seq_params.layout is not None
        tokens = len(query) - packed_seq_params.padding
        q, k, v = (x[:tokens].permute(1, 2, 0, 3) for x in (query, key, value))
        out, _weights = packed_attention(self, q, k, v, None, packed=packed_seq_params.layout, scaling=self.scaling)
        return torch.nn.functional.pad(out.transpose(0, 1).flatten(2), (0, 0, 0, 0, 0, packed_seq_params.padding))


# Multi-token prediction (DeepSeek-V3, arXiv 2412.19437 §2.2): heads that predict tokens further ahead.
#
# At position t, head k (from 0) reads the hidden state of head k - 1 (of the decoder, for the first) and the embedding
# of token t + k + 1, and predicts token t + k + 2. The weights are Megatron's module. The tokens ahead are looked up
# when a micro-batch is packed, so ranks do not exchange them, as they do when Megatron rolls its tensors.
#
# The loss is ``--mtp-loss-scaling-factor`` times the mean over the heads of::
#
#     1 / (targets of head k in the step) * sum over the step's loss tokens with k + 2 tokens before them of -log p
#
# with p at temperature 1. Its gradient also reaches the decoder, the embedding and the output head.


@dataclass(frozen=True)
class NextTokens:
    """The tokens ahead of each token of this rank, for each head, in a micro-batch without shared tokens."""

    inputs: torch.Tensor  # int64 [heads, B, S] as in PackedTokens; 0 beyond a sample's end
    targets: torch.Tensor  # int64 [heads, B * S]
    mask: torch.Tensor  # bool [heads, B * S]: the target is a loss token

    @classmethod
    def of(
        cls, batch: TrainBatch, samples: Sequence[int], micro: MicroBatch, heads: int, shape: tuple[int, int]
    ) -> NextTokens:
        """Look up the tokens ahead.

        Args:
            batch: The shard's batch.
            samples: The samples of the micro-batch, as indices into ``batch``.
            micro: The micro-batch.
            heads: The number of heads.
            shape: [B, S] of its tokens with padding.
        """
        both = np.zeros((2, heads + 1, math.prod(shape)), np.int64)
        if samples:
            columns = np.concatenate([_ahead(batch, i, micro.context, heads) for i in samples], axis=2)
            where = micro.token_index.numpy() if micro.padded else np.arange(columns.shape[2])
            both[:, :, where] = columns
        tokens, masks = torch.as_tensor(both, device=micro.input_ids.device)
        return cls(inputs=tokens[:-1].view(heads, *shape), targets=tokens[1:], mask=masks[1:] > 0)


def _ahead(batch: TrainBatch, sample: int, context: ContextGroup, heads: int) -> np.ndarray:
    """Return the token and the loss mask 1, 2, …, heads + 1 after each position; int64 [2, heads + 1, positions]."""
    tokens = batch.tokens[sample]
    prompt = len(tokens) - batch.response_lengths[sample]
    mask = np.concatenate([np.zeros(prompt, np.int64), batch.loss_masks[sample].astype(np.int64)])
    where = zigzag_positions(len(tokens), context.size, context.rank) + np.arange(1, heads + 2)[:, None]
    inside = where < len(tokens)
    where = np.minimum(where, len(tokens) - 1)
    return np.stack([np.where(inside, tokens[where], 0), np.where(inside, mask[where], 0)])


class PackedMtpLayer(MultiTokenPredictionLayer):
    """Megatron's head, which reads the tokens ahead from the micro-batch instead of rolling its own."""

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: Any,
        hidden_states: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        ahead = kwargs["packed_seq_params"].ahead.inputs[self.layer_number - 1]
        embedded = embedding(input_ids=ahead, position_ids=position_ids)
        return inputs_of_head(input_ids, position_ids, kwargs.get("padding_mask"), embedded, hidden_states)

    def _checkpointed_forward(self, *function: Any, **kwargs: Any) -> torch.Tensor:
        """Recompute the layer in backward. Megatron's own would save every argument as a tensor; the layout is none.

        Releases that pass the ``function`` to run again (versions.py) always pass
        ``_proj_and_transformer_layer``.
        """
        assert function == recomputed_function(self._proj_and_transformer_layer)
        activations = kwargs.pop("hidden_states"), kwargs.pop("decoder_input")

        def run(hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self._proj_and_transformer_layer(
                hidden_states=hidden_states, decoder_input=decoder_input, **kwargs
            )
            return out

        recomputed: torch.Tensor = tensor_parallel.checkpoint(
            run, self.config.distribute_saved_activations, *activations
        )
        return recomputed


def mtp_spec(layer: ModuleSpec, norm: type, heads: int) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec of ``heads`` heads, each with its own decoder layer."""
    parts: dict[str, Any] = {"enorm": norm, "hnorm": norm, "layer_norm": norm, mtp_layer_name(): layer}
    submodules = MultiTokenPredictionLayerSubmodules(eh_proj=ColumnParallelLinear, **parts)
    head = ModuleSpec(module=PackedMtpLayer, submodules=submodules)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[head] * heads)
