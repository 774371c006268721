"""From the samples of a micro-batch to the packed tensors that the model and the loss read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from miles.loss.advantages import grpo_advantages
from miles.train_batch import MicroBatch, TrainBatch


def collate(batch: TrainBatch, indices: Sequence[int], device: torch.device) -> MicroBatch:
    """Pack the samples ``indices`` of ``batch`` without padding, equal prompts once.

    A causal model computes the same for a prompt whichever response follows, so the samples of a group share it; the
    gradients of all of them add up in it.

    No samples give a micro-batch of one token and no response: the rank takes part in every collective and adds zero.
    """
    part = batch.select(indices)
    assert all(total > response for total, response in zip(part.total_lengths, part.response_lengths, strict=True)), (
        "a sample needs a prompt token, whose logits predict its first response token"
    )
    totals, responses = part.total_lengths, part.response_lengths
    starts = np.concatenate([[0], np.cumsum(totals)]).astype(np.int64)
    sample_index = np.repeat(np.arange(len(part)), responses)
    within = _ranges(responses)
    first_response = starts[:-1] + np.asarray(totals, np.int64) - np.asarray(responses, np.int64)
    position = first_response[sample_index] + within if len(part) else within
    tokens = np.concatenate(part.tokens) if len(part) else np.zeros(1, np.int64)
    part_lengths = totals or [1]
    token_index, kept = _share_prompts(tokens, part_lengths, responses or [0])

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=device)

    def response_axis(columns: list[np.ndarray] | None) -> torch.Tensor | None:
        return None if columns is None else tensor(_concatenate(columns), torch.float32)

    index = tensor(sample_index, torch.int64)
    rollout_log_probs = response_axis(part.rollout_log_probs)
    loss_mask = response_axis(part.loss_masks)
    assert rollout_log_probs is not None and loss_mask is not None
    return MicroBatch(
        input_ids=tensor(tokens[kept], torch.int64),
        position_ids=tensor(_ranges(part_lengths)[kept], torch.int64),
        token_index=tensor(token_index, torch.int64),
        logit_index=tensor(token_index[position - 1], torch.int64),
        targets=tensor(tokens[position], torch.int64),
        sample_index=index,
        loss_mask=loss_mask,
        advantages=grpo_advantages(tensor(part.rewards, torch.float32), index),
        rollout_log_probs=rollout_log_probs,
        old_log_probs=response_axis(part.old_log_probs),
        ref_log_probs=response_axis(part.ref_log_probs),
        sample_denoms=tensor(part.sample_denoms, torch.float32),
        rollout_token_counts=tensor(part.rollout_token_counts, torch.float32),
        response_lengths=tuple(responses),
        total_lengths=tuple(part_lengths),
        num_rollouts=part.num_rollouts,
        num_loss_tokens=part.num_loss_tokens,
    )


def _share_prompts(tokens: np.ndarray, totals: list[int], responses: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where each token stands once equal prompts stand once, and which tokens are kept: int64 [all], int64 [packed]."""
    stands_for = np.arange(len(tokens))
    first_with: dict[bytes, int] = {}
    start = 0
    for total, response in zip(totals, responses, strict=True):
        prompt = slice(start, start + total - response)
        first = first_with.setdefault(tokens[prompt].tobytes(), start)
        stands_for[prompt] += first - start
        start += total
    kept = np.flatnonzero(stands_for == np.arange(len(tokens)))
    return np.searchsorted(kept, stands_for), kept


def split_by_sample(values: torch.Tensor, micro: MicroBatch) -> list[np.ndarray]:
    """A flat response vector [R] as one float32 array a sample."""
    parts = values.detach().float().cpu().split(list(micro.response_lengths))
    return [part.numpy() for part in parts]


def _ranges(lengths: Sequence[int]) -> np.ndarray:
    """0..n-1 for each length, one after the other."""
    if not lengths:
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])


def _concatenate(columns: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, np.float32)
