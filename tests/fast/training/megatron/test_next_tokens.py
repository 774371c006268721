"""What heads of multi-token prediction are told stands beside the tokens of the micro-batch, also of an empty one."""

from __future__ import annotations

import pytest
import torch

from miles.arguments.loss import LossArguments
from miles.batching.collate import collate
from miles.parallel.groups import ContextGroup
from miles.rollout.convert import convert
from miles.sample import Prompt, PromptGroup, Sample
from miles.train_batch import TrainBatch

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> TrainBatch:
    """One sample of a prompt of 4 tokens and a response of 3."""
    prompt = Prompt("", (1, 2, 3, 4))
    given = dict(response_ids=[5, 6, 7], loss_mask=[1, 1, 1], rollout_log_probs=[-1.0] * 3, reward=1.0)
    group = PromptGroup(0, prompt, [Sample(prompt, 0, 0, **given)])
    return convert([group], loss=LossArguments(disable_rewards_normalization=True), global_batch_size=1)[0]


@pytest.mark.parametrize("samples", [(), (0,)])
@pytest.mark.parametrize("size", [1, 2])
def test_as_many_columns_as_tokens(batch: TrainBatch, samples: tuple[int, ...], size: int) -> None:
    from miles.training.megatron.mtp import NextTokens

    for rank in range(size):
        context = ContextGroup(size, rank, None)
        micro = collate(batch, samples, CPU, context, share_prompts=False)
        ahead = NextTokens.of(batch, samples, context, heads=2, multiple=1, device=CPU)
        assert ahead.inputs.shape == ahead.targets.shape == ahead.mask.shape == (2, len(micro.input_ids))
        assert samples or not ahead.mask.any()
