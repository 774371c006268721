"""A micro-batch from its masks; the loss reads nothing of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.parallel.groups import ALONE
from miles.train_batch import MicroBatch


def _make_micro(masks: list[list[float]], **given: Any) -> MicroBatch:
    """Samples with these loss masks and prompts of two tokens; by default the whole step, one sample a rollout."""
    counts = [sum(m) for m in masks]
    lengths = [len(m) for m in masks]
    size = sum(lengths)
    starts = torch.tensor([0, *(n + 2 for n in lengths)]).cumsum(0)
    sample_index = torch.arange(len(masks)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    columns: dict[str, Any] = dict(
        input_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
        position_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
        token_index=torch.arange(int(starts[-1])),
        logit_index=torch.arange(size) + 2 * sample_index + 1,
        targets=torch.zeros(size, dtype=torch.int64),
        sample_index=sample_index,
        response_index=torch.arange(size),
        loss_mask=torch.tensor([x for m in masks for x in m], dtype=torch.float32),
        advantages=torch.ones(size),
        rollout_log_probs=torch.zeros(size),
        old_log_probs=None,
        ref_log_probs=None,
        sample_denoms=torch.tensor([max(c, 1.0) for c in counts]),
        trajectory_token_counts=torch.tensor([max(c, 1.0) for c in counts]),
        response_lengths=tuple(lengths),
        total_lengths=tuple(n + 2 for n in lengths),
        num_trajectories=len(masks),
        num_loss_tokens=int(sum(counts)),
        context=ALONE,
    )
    return MicroBatch(**(columns | given))


@pytest.fixture(scope="session")
def make_micro() -> Callable[..., MicroBatch]:
    return _make_micro
