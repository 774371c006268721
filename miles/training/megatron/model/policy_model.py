"""Megatron's ``GPTModel`` as the trainer sees it: tokens in, log-probs and entropy out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from miles.config.lora import LoraArguments
from miles.models.registry import vocabulary_shape
from miles.training.backend import PolicyScores
from miles.training.megatron.model.adapter import Adapter, LinearLayer
from miles.training.megatron.model.layer_spec import decoder_spec, heads_spec
from miles.training.megatron.model.packed_tokens import PackedTokens, tokens_at
from miles.training.megatron.model.rotary_embedding import PackedRotaryEmbedding, inverse_frequencies
from miles.training.megatron.model.vocab_parallel import vocab_parallel_log_probs
from miles.training.megatron.moe.auxiliary import attach
from miles.training.megatron.process_groups import Ranks
from miles.types.support import Support
from miles.types.train_batch import MicroBatch, SharedLogits


def _with_gradient(_module: torch.nn.Module, _given: Any, embedded: torch.Tensor) -> torch.Tensor:
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


class PolicyModel(GPTModel):
    """One pipeline stage. ``forward`` gives hidden states on every stage; the last one's go to ``scorer``.

    The head is not part of ``forward``: only response positions need it, and a chunk of them at a time. In an
    interleaved pipeline a rank has several ``chunks``, in order; the last of them stands for the rank.
    """

    NOT_IN_CHECKPOINT: tuple[str, ...] = ("canary",)  # parameters that no Hugging Face checkpoint has

    def __init__(
        self,
        config: TransformerConfig,
        hf_config: PretrainedConfig,
        ranks: Ranks,
        temperature: float,
        chunk_size: int,
        with_canary: bool,
        fp32_head: bool = False,
        *,
        chunk: int | None = None,
    ) -> None:
        chunks = config.virtual_pipeline_model_parallel_size or 1
        is_last = ranks.is_last_stage and chunk in (None, chunks - 1)
        vocabulary = vocabulary_shape(hf_config.to_dict())
        tp_size = ranks.tp.size()
        super().__init__(
            config,
            decoder_spec(config, ranks.pp.rank(), chunk),
            vocab_size=-(-vocabulary["vocab_size"] // tp_size) * tp_size,
            max_sequence_length=vocabulary["max_position_embeddings"],
            pre_process=ranks.is_first_stage and not chunk,
            post_process=is_last,
            share_embeddings_and_output_weights=not vocabulary["untie_embeddings_and_output_weights"],
            position_embedding_type="rope",
            mtp_block_spec=heads_spec(config) if is_last else None,
            vp_stage=chunk,
        )
        self.earlier_chunks: tuple[PolicyModel, ...] = ()
        self.rotary_pos_emb = PackedRotaryEmbedding(inverse_frequencies(hf_config))
        self.tokens_in_vocabulary = vocabulary["vocab_size"]
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.fp32_head = fp32_head
        self.to(config.params_dtype)
        # The scalar of objective/canary.py is reduced like every parameter, in fp32.
        self.canary = torch.nn.Parameter(torch.zeros(1)) if with_canary and is_last else None
        self.adapter: Adapter | None = None

    @classmethod
    def build_chunks(cls, config: TransformerConfig, *given: Any) -> PolicyModel:
        """Build all chunks of this rank, and return the last; ``given`` are the other arguments of the class."""
        number = config.virtual_pipeline_model_parallel_size
        parallel_state.set_virtual_pipeline_model_parallel_world_size(number)  # the schedule asks for it
        if number is None:
            return cls(config, *given)
        *earlier, last = (cls(config, *given, chunk=chunk) for chunk in range(number))
        last.earlier_chunks = tuple(earlier)
        return last

    @property
    def chunks(self) -> tuple[PolicyModel, ...]:
        """All chunks of this rank, in order; of the last one only."""
        return (*self.earlier_chunks, self)

    def add_adapter(self, layers_of: Callable[[PolicyModel], Sequence[LinearLayer]], lora: LoraArguments) -> Adapter:
        """Give all chunks an adapter, which is still 0, and freeze everything else but the canary.

        Args:
            layers_of: Returns the linear layers of a chunk.
            lora: Which of them get an adapter, and its size.

        Returns:
            The adapter of the last chunk, which stands for the rank.
        """
        earlier: list[Adapter] = []
        for chunk in self.chunks:
            chunk.requires_grad_(False)
            if chunk.canary is not None:
                chunk.canary.requires_grad_(True)
            chunk.adapter = Adapter(layers_of(chunk), lora, earlier)
            earlier.append(chunk.adapter)
            if chunk.pre_process:
                # Recomputed layers have no graph if nothing that they are given has one.
                chunk.embedding.register_forward_hook(_with_gradient)
        return earlier[-1]

    def is_of_checkpoint(self, name: str) -> bool:
        """Return whether a Hugging Face checkpoint has the parameter ``name``."""
        return name not in self.NOT_IN_CHECKPOINT and not name.startswith("adapter.")

    def _postprocess(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: PackedTokens, **given: Any
    ) -> torch.Tensor:
        """Megatron's own would compute the logits of every token here."""
        if not self.mtp_process or not torch.is_grad_enabled():
            return hidden_states
        everything = self.mtp(
            input_ids=given["input_ids"],
            position_ids=given["position_ids"],
            hidden_states=hidden_states,
            attention_mask=None,
            rotary_pos_emb=given["rotary_pos_emb"],
            packed_seq_params=packed_seq_params,
            embedding=self.embedding,
        )
        own, *of_heads = everything.chunk(1 + self.config.mtp_num_layers)
        return attach(own, self._mtp_loss(of_heads, packed_seq_params))

    def _mtp_loss(self, of_heads: list[torch.Tensor], packed: PackedTokens) -> torch.Tensor:
        """Return this rank's share of the loss of mtp.py, scaled for its gradient."""
        ahead, step = packed.ahead, packed.auxiliary
        assert ahead is not None and step is not None
        mean = torch.zeros((), device=of_heads[0].device)
        for hidden, targets, mask, count in zip(of_heads, ahead.targets, ahead.mask, step.mtp_targets, strict=True):
            index = mask.nonzero()[:, 0]
            log_probs, _ = self._log_probs(hidden, index, targets[index], temperature=1.0)
            mean = mean - log_probs.sum() / (max(count, 1.0) * len(of_heads))
        if self.pg_collection.tp.rank() == 0:  # the others have the same
            step.saw_mtp(mean)
        return step.auxiliary_loss_factor * step.sizes.mtp_loss_scaling_factor * mean

    def scorer(self, hidden_states: torch.Tensor, micro: MicroBatch) -> Any:
        """Return the end of the forward pass over ``micro``: here a ``PolicyScorer`` (training/backend.py)."""
        return partial(self.score, hidden_states, micro)

    def score(
        self, hidden_states: torch.Tensor, micro: MicroBatch, with_entropy: bool, sharpness: float = 1.0
    ) -> PolicyScores:
        """Compute log-probs of ``micro.targets`` under softmax(logits sharpness / temperature), entropy if asked.

        If the micro-batch has supports, the softmax is over these.

        The canary is in the graph of every step, watched or not: overlapped reductions wait for the gradient of every
        parameter.
        """
        temperature = (self.temperature or 1.0) / sharpness
        of_targets = self._log_probs(
            hidden_states,
            micro.logit_index,
            micro.targets,
            temperature,
            with_entropy,
            micro.support,
            micro.shared_logits,
        )
        return PolicyScores(*of_targets, canary=None if self.canary is None else self.canary.sum())

    def _log_probs(
        self,
        hidden_states: torch.Tensor,
        index: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool = False,
        support: Support | None = None,
        shared: SharedLogits | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of ``targets`` [R] at the tokens ``index`` [R], as in ``MicroBatch``, of ``hidden_states`` [S, B, H]."""
        tp = self.pg_collection.tp
        index = index if shared is None else shared.tokens
        if self.config.sequence_parallel:
            # Its backward sums the ranks' gradients; each has the part of its own vocabulary.
            whole = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=tp)
            chosen = tokens_at(whole, index)
        else:
            chosen = copy_to_tensor_model_parallel_region(tokens_at(hidden_states, index), group=tp)
        return vocab_parallel_log_probs(
            chosen,
            self.head_weight(),
            targets,
            first_token=tp.rank() * self.vocab_size // tp.size(),
            temperature=temperature,
            chunk_size=self.chunk_size,
            group=tp,
            with_entropy=with_entropy,
            fp32=self.fp32_head,
            support=support,
            shared=shared,
        )

    def head_weight(self) -> torch.Tensor:
        """Return the head's rows of this rank's vocabulary, without the padding to a multiple of the ranks."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        first = self.pg_collection.tp.rank() * weight.shape[0]
        return weight[: max(0, min(weight.shape[0], self.tokens_in_vocabulary - first))]
