"""Megatron's model as the trainer sees it: tokens in; log-probs and entropy, or values, out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from miles.config.lora import LoraArguments
from miles.models.registry import vocabulary_shape
from miles.objective.output import PolicyScores
from miles.objective.token_log_probs import chunked_log_probs
from miles.training.megatron.layers import PackedRotaryEmbedding, decoder_spec, heads_spec, inverse_frequencies
from miles.training.megatron.model.adapter import Adapter, LinearLayer
from miles.training.megatron.model.packed_tokens import PackedTokens, tokens_at
from miles.training.megatron.moe import attach
from miles.training.megatron.process_groups import Ranks
from miles.types.head import head_logits
from miles.types.support import Support
from miles.types.train_batch import MicroBatch, SharedLogits

# Log-probs and entropy when each tensor-parallel rank holds the logits of a part of the vocabulary.
#
# As in objective/token_log_probs.py, positions are processed in chunks and the gradient is written by hand. The ranks
# exchange four numbers per position (maximum, sum of exponentials, the target's logit, weighted sum), never logits.


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    first_token: int,
    temperature: float,
    chunk_size: int,
    group: dist.ProcessGroup,
    with_entropy: bool = False,
    fp32: bool = False,
    support: Support | None = None,
    shared: SharedLogits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of ``targets`` and, if asked, the entropy in nats; fp32 [R], the same on every rank.

    Collective over ``group``. The gradient of ``hidden`` is this rank's part: the caller sums it over ``group``. A
    group of one uses ``miles.objective.token_log_probs.chunked_log_probs``.

    Args:
        hidden: [R, H], or [U, H] for the rows of ``shared``; the same on every rank.
        weight: [v, H], this rank's rows of the head.
        targets: int64 [R], token ids.
        first_token: The token of the first row of ``weight``.
        temperature: Logits are divided by it, unless it is 0.
        chunk_size: Positions computed at once; all if 0.
        group: The tensor-parallel ranks.
        with_entropy: Whether to return the entropy.
        fp32: Whether the logits are computed in fp32 under a body in bf16.
        support: The sets that the softmax is restricted to, if any; of the whole vocabulary on every rank.
        shared: Which row each response token reads. Ranks that share a vocabulary compute it for each of them.
    """
    if group.size() == 1:
        return chunked_log_probs(
            hidden,
            weight,
            targets,
            temperature,
            chunk_size,
            with_entropy=with_entropy,
            fp32=fp32,
            support=support,
            shared=shared,
        )
    hidden = hidden if shared is None else hidden[shared.row]
    assert len(weight), "every rank must have a token of the vocabulary"
    rows = chunk_size if chunk_size > 0 else max(len(hidden), 1)
    scale = 1.0 / temperature if temperature > 0 else 1.0
    local = targets - first_token
    local = torch.where((local >= 0) & (local < len(weight)), local, -1)  # -1: on another rank
    arguments = hidden, weight, local, scale, rows, with_entropy, fp32, group, support, first_token
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _VocabParallelLogProbs.apply
    return apply(*arguments)


class _VocabParallelLogProbs(torch.autograd.Function):
    """Computes log-probs and entropy from sums over the vocabulary.

    With scaled logits z and their maximum m::

        s = sum exp(z - m)     e = sum exp(z - m) (z - m)
        lse = m + log s        log p[target] = z[target] - lse        entropy = log s - e / s
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        local: torch.Tensor,
        scale: float,
        rows: int,
        with_entropy: bool,
        fp32: bool,
        group: dist.ProcessGroup,
        support: Support | None,
        first_token: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        lse, log_probs, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, scale, fp32)
            if support is not None:
                support.exclude_(logits, part, first_token)
            maximum = logits.amax(1)
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
            logits -= maximum[:, None]
            mine = local[part] >= 0
            chosen = logits.gather(1, local[part].clamp_min(0)[:, None])[:, 0] * mine
            exponentials = logits.exp()
            sums = torch.stack([exponentials.sum(1), chosen, torch.linalg.vecdot(exponentials, logits)])
            dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            lse[part] = maximum + log_sum
            log_probs[part] = sums[1] - log_sum
            entropy[part] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, local, lse, entropy)
        ctx.scale, ctx.rows, ctx.fp32 = scale, rows, fp32
        ctx.support, ctx.first_token = support, first_token
        ctx.set_materialize_grads(False)
        return log_probs, entropy if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, local, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        dtype = lse.dtype if ctx.fp32 else hidden.dtype  # of the products
        head = weight.to(dtype)
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            log_p = _logits(hidden[part], weight, ctx.scale, ctx.fp32)
            if ctx.support is not None:
                ctx.support.exclude_(log_p, part, ctx.first_token)
            log_p.sub_(lse[part, None])
            grad = torch.zeros_like(log_p)
            if grad_entropy is not None:
                grad -= grad_entropy[part, None] * (log_p + entropy[part, None])
            if grad_log_probs is not None:
                grad -= grad_log_probs[part, None]
            grad *= log_p.exp_()
            if grad_log_probs is not None:
                mine = local[part] >= 0
                grad.scatter_add_(1, local[part].clamp_min(0)[:, None], (grad_log_probs[part] * mine)[:, None])
            grad = grad.mul_(ctx.scale).to(dtype)
            grad_hidden[part] = grad @ head
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part].to(dtype)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, *(None,) * 8


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, fp32: bool) -> torch.Tensor:
    logits = head_logits(hidden, weight, fp32=fp32).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if scale == 1.0 else logits.mul_(scale)


# The policy: a ``GPTModel`` whose head is applied to response positions only.


def _with_gradient(_module: torch.nn.Module, _inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


class PolicyModel(GPTModel):
    """One pipeline stage. ``forward`` gives hidden states on every stage; the last one's go to ``scorer``.

    The head is not part of ``forward``: only response positions need it, and a chunk of them at once. In an
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
    def build_chunks(cls, config: TransformerConfig, *args: Any) -> PolicyModel:
        """Build all chunks of this rank, and return the last; ``args`` are the other arguments of the class."""
        number = config.virtual_pipeline_model_parallel_size
        parallel_state.set_virtual_pipeline_model_parallel_world_size(number)  # the schedule asks for it
        if number is None:
            return cls(config, *args)
        *earlier, last = (cls(config, *args, chunk=chunk) for chunk in range(number))
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
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: PackedTokens, **kwargs: Any
    ) -> torch.Tensor:
        """Megatron's own would compute the logits of every token here."""
        if not self.mtp_process or not torch.is_grad_enabled():
            return hidden_states
        everything = self.mtp(
            input_ids=kwargs["input_ids"],
            position_ids=kwargs["position_ids"],
            hidden_states=hidden_states,
            attention_mask=None,
            rotary_pos_emb=kwargs["rotary_pos_emb"],
            packed_seq_params=packed_seq_params,
            embedding=self.embedding,
        )
        of_decoder, *of_heads = everything.chunk(1 + self.config.mtp_num_layers)
        return attach(of_decoder, self._mtp_loss(of_heads, packed_seq_params))

    def _mtp_loss(self, of_heads: list[torch.Tensor], packed: PackedTokens) -> torch.Tensor:
        """Return this rank's share of the loss of packed_tokens.py, scaled for its gradient."""
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
            # Its backward sums the ranks' gradients; each has the part of its vocabulary shard.
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


# The critic on Megatron: a policy's decoder with one number per token instead of the vocabulary.


class ValueStage(PolicyModel):
    """One pipeline stage. ``forward`` is the policy's; the last stage's hidden states go to ``scorer``.

    Every tensor-parallel rank has the whole head and computes every value, so that neither it nor the gradient of the
    hidden states needs a collective. The head is fp32, and starts at 0: a critic that knows nothing predicts no reward.
    """

    NOT_IN_CHECKPOINT = (*PolicyModel.NOT_IN_CHECKPOINT, "value_head")

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
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
        """Return decoder and head for a checkpoint. ``GPTModel``'s own method asks for the vocabulary's head."""
        described: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return described

    def scorer(self, hidden_states: torch.Tensor, micro: MicroBatch) -> Any:
        """Return the end of the forward pass over ``micro``: here a ``ValueScorer``."""
        return partial(self.values, hidden_states, micro)

    def values(self, hidden_states: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """Return the value of the state where each token of ``micro.targets`` is chosen, fp32 [R]."""
        assert self.value_head is not None, "the head is on the last stage"
        whole = hidden_states
        if self.config.sequence_parallel:
            # All ranks compute the same gradient of the whole; each takes its own part back.
            tp = self.pg_collection.tp
            whole = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False, group=tp)
        return tokens_at(whole, micro.logit_index).float() @ self.value_head[0]
