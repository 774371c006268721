"""Give the routers of a pass the experts that were chosen before, through Megatron's hook ``router_replay``.

``topk_routing_with_score_function`` (megatron-core 0.16.1 ``transformer/moe/moe_utils.py``) asks ``router_replay`` for
the experts and computes their weights from the router's logits. Megatron's own ``RouterReplay`` keeps its choices in a
global list. In a pipeline, passes over several micro-batches alternate, so here each micro-batch carries its choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from miles.types.expert_choices import UNKNOWN


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer: given, kept when they are chosen, or neither.

    Attributes:
        given: int16 [tokens of the router, k], ``UNKNOWN`` for the router's own choice.
        keep: Receives the chosen experts, int64 [tokens of the router, k].
    """

    given: torch.Tensor | None
    keep: Callable[[torch.Tensor], None] | None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [tokens, k] of the experts, and the experts; called by Megatron's router."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.given is not None:
            given = self.given.to(experts)
            experts = torch.where(given == UNKNOWN, experts, given)
            values = scores.gather(1, experts)
        if self.keep is not None:
            self.keep(experts.detach())
        return values, experts


@dataclass(frozen=True)
class MicroBatchExperts:
    """The experts of a micro-batch in the order in which this rank's routers see its tokens.

    Attributes:
        given: int16 [tokens, layers, k], of all decoder layers.
        kept: By layer, int16 [tokens, k]: of this stage, from the first pass on.
        keeps: Whether this pass is the first.
    """

    given: torch.Tensor | None = None
    kept: dict[int, torch.Tensor] | None = None
    keeps: bool = False

    @classmethod
    def of(
        cls,
        experts: torch.Tensor,
        shape: tuple[int, int],
        padding: int,
        sequence_parallel: dist.ProcessGroup | None,
    ) -> MicroBatchExperts:
        """Arrange ``experts``, [T, layers, k] in the order of ``MicroBatch``, for routers that receive [S, B].

        Args:
            experts: The experts.
            shape: B and S, with padding.
            padding: How many of these tokens belong to no sample; they are the last.
            sequence_parallel: The ranks that hold equal parts of S, if any.
        """
        padded = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, padding), value=UNKNOWN)
        ordered = padded.view(*shape, *experts.shape[1:]).transpose(0, 1).flatten(0, 1)
        if sequence_parallel is not None:
            ordered = ordered.chunk(sequence_parallel.size())[sequence_parallel.rank()]
        return cls(given=ordered)

    def of_layer(self, layer: int) -> LayerExperts:
        """Return those of the decoder layer ``layer``, counted from 0."""
        if self.given is not None:
            return LayerExperts(self.given[:, layer], None)
        assert self.kept is not None
        kept = self.kept

        def keep(experts: torch.Tensor) -> None:
            kept[layer] = experts.to(torch.int16).cpu()

        if self.keeps:
            return LayerExperts(None, keep)
        given = kept.get(layer)
        return LayerExperts(None, None) if given is None else LayerExperts(given, None)
