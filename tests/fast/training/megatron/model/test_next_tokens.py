"""The next tokens for multi-token prediction are aligned with the micro-batch's tokens, even in an empty one."""

from __future__ import annotations

import pytest
import torch

from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.objective.settings import LossArguments
from miles.types.groups import ContextGroup
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch

CPU = torch.device("cpu")


@pytest.fixture
def batch() -> TrainBatch:
    """Return two samples of a prompt of 4 tokens, with responses of 3 and 5."""
    prompt = Prompt("", (1, 2, 3, 4))
    samples = [
        Sample(
            prompt, 0, i, response_ids=ids, loss_mask=[1] * len(ids), rollout_log_probs=[-1.0] * len(ids), reward=1.0
        )
        for i, ids in enumerate([[5, 6, 7], [8, 9, 10, 11, 12]])
    ]
    group = PromptGroup(0, prompt, samples)
    return convert([group], loss=LossArguments(disable_rewards_normalization=True), global_batch_size=2)[0]


@pytest.mark.parametrize("samples", [(), (0,), (0, 1)])
@pytest.mark.parametrize("size, row_multiple", [(1, None), (2, None), (1, 4)])
def test_next_tokens_align_with_every_token(
    batch: TrainBatch, samples: tuple[int, ...], size: int, row_multiple: int | None
) -> None:
    from miles.training.megatron.model.packed_tokens import NextTokens

    for rank in range(size):
        micro = collate(batch, samples, CPU, ContextGroup(size, rank, None), False, row_multiple)
        shape = (micro.rows, len(micro.input_ids) // micro.rows)
        ahead = NextTokens.of(batch, samples, micro, heads=2, shape=shape)
        assert ahead.inputs.shape == (2, *shape) and ahead.targets.shape == ahead.mask.shape == (
            2,
            len(micro.input_ids),
        )
        assert torch.equal(ahead.inputs[1].flatten(), ahead.targets[0]), (
            "what one head predicts is the next one's input"
        )
        assert bool(ahead.mask.any()) == bool(samples)
        if size == 1:
            own, predicted = micro.input_ids[2:], ahead.targets[0, :-2]
            assert torch.equal(own[ahead.mask[0, :-2]], predicted[ahead.mask[0, :-2]])
