"""Takes the layout of a micro-batch, packed or padded, through Megatron's model to attention and rotary embedding.

Megatron passes ``packed_seq_params`` to both, so the layout travels in it. Megatron's own packed format (``thd``)
describes consecutive sequences by cumulative lengths, which cannot express samples that share tokens. So Megatron
sees one sequence of T tokens (``sbhd``), and ``PackedTokens`` knows which tokens belong to which sample. Padded samples
are B sequences of S tokens to Megatron. Its activations have the sequence first: [S, B, hidden].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.training.packed_attention import PackedLayout, packed_attention
from miles.types.train_batch import MicroBatch

if TYPE_CHECKING:
    from miles.training.megatron.model.mtp import NextTokens
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
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
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
