"""The critic on Megatron: a policy's decoder with one number per token instead of the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from miles.training.megatron.model.packed_tokens import tokens_at
from miles.training.megatron.model.policy_model import PolicyModel
from miles.types.train_batch import MicroBatch


class ValueModel(PolicyModel):
    """One pipeline stage. ``forward`` is the policy's; the last stage's hidden states go to ``scorer``.

    Every tensor-parallel rank has the whole head and computes every value, so that neither it nor the gradient of the
    hidden states needs a collective. The head is fp32, and starts at 0: a critic that knows nothing predicts no reward.
    """

    NOT_IN_CHECKPOINT = (*PolicyModel.NOT_IN_CHECKPOINT, "value_head")

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.value_head: torch.nn.Parameter | None = None
        if self.post_process:
            # No logits: a head that never gets a gradient would keep overlapped reductions waiting. Nor is its weight
            # the embedding's any more, whose gradient is then whole on the first stage.
            self.output_layer = None
            self.value_head = torch.nn.Parameter(torch.zeros(1, self.config.hidden_size))
        self.share_embeddings_and_output_weights = False

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what a checkpoint holds: decoder and head. ``GPTModel``'s own asks for the vocabulary's head."""
        described: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return described

    def scorer(self, hidden_states: torch.Tensor, micro: MicroBatch) -> Any:
        """Return the end of the forward pass over ``micro``: here a ``ValueScorer``."""
        return partial(self.values, hidden_states, micro)

    def values(self, hidden_states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """Return the value of the state in which each token of ``micro.targets`` is chosen, fp32 [R]."""
        assert self.value_head is not None, "the head is on the last stage"
        whole = hidden_states
        if self.config.sequence_parallel:
            # All ranks compute the same gradient of the whole; each takes its own part back.
            tp = self.pg_collection.tp
            whole = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False, group=tp)
        return tokens_at(whole, micro.logit_index).float() @ self.value_head[0]
