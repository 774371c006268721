"""A micro-batch from its masks; the loss reads nothing of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.loss_types.policy_loss import policy_loss_function
from miles.objective.settings import LossArguments
from miles.types.groups import ALONE
from miles.types.train_batch import MicroBatch


def _make_micro(masks: list[list[float]], **fields: Any) -> MicroBatch:
    """Samples with these masks, one per trajectory, and prompts of two tokens; by default they are the whole step."""
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
        read_lengths=tuple(n + 2 for n in lengths),
        num_trajectories=len(masks),
        num_loss_tokens=int(sum(counts)),
        context=ALONE,
    )
    return MicroBatch(**(columns | fields))


@pytest.fixture(scope="session")
def make_micro() -> Callable[..., MicroBatch]:
    return _make_micro


def _advantages_of(
    loss: LossArguments, groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]] | None = None
) -> list[list[float]]:
    """Phase 1 for groups of rewards: one sample per trajectory, one loss token per sample; in the same shape."""
    rewards = [reward for group in groups for reward in group]
    indices = [number for number, group in enumerate(groups) for _ in group]
    tokens = [1] * len(rewards) if lengths is None else [length for group in lengths for length in group]
    values = iter(build_objective(loss).sample_advantages(SampleRewards(rewards, indices, range(len(rewards)), tokens)))
    return [[next(values) for _ in group] for group in groups]


def _gradient_of(loss: LossArguments, micro: MicroBatch, log_probs: Sequence[float]) -> tuple[float, torch.Tensor, Any]:
    """The policy loss of a micro-batch at these log-probs, its gradient [R] in float64, and the metrics."""
    values = torch.tensor(log_probs, requires_grad=True)
    output = policy_loss_function(build_objective(loss), micro, values, None)
    output.loss.backward()
    assert values.grad is not None
    return output.loss.item(), values.grad.double(), output.metrics


@pytest.fixture(scope="session")
def advantages_of() -> Callable[..., list[list[float]]]:
    return _advantages_of


@pytest.fixture(scope="session")
def gradient_of() -> Callable[..., tuple[float, torch.Tensor, Any]]:
    return _gradient_of


@pytest.fixture(scope="session")
def command() -> str:
    """The flags that every run needs."""
    return (
        "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 2 "
        "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 "
    )


@dataclass(frozen=True)
class OffPolicy:
    """A micro-batch away from its old policy, and its samples without masked tokens, float64 (log p, log p_old, A)."""

    micro: MicroBatch
    log_probs: list[float]
    samples: list[tuple[torch.Tensor, torch.Tensor, float]]

    def expected(self, sequence_loss: Callable[..., torch.Tensor]) -> tuple[float, torch.Tensor]:
        """The mean over samples of ``sequence_loss(log p, log p_old, A)``, and its gradient [R], 0 where masked."""
        leaves = [p.clone().requires_grad_() for p, _, _ in self.samples]
        losses = [
            sequence_loss(p, old, a) if len(p) else p.sum() for p, (_, old, a) in zip(leaves, self.samples, strict=True)
        ]
        total = torch.stack(losses).mean()
        total.backward()
        gradient = torch.zeros(len(self.log_probs), dtype=torch.float64)
        gradient[self.micro.loss_mask != 0] = torch.cat([p.grad for p in leaves if p.grad is not None])
        return total.item(), gradient


def _off_policy(seed: int, scale: float = 0.5) -> OffPolicy:
    """Four samples, one of them fully masked; masked tokens hold NaN. Every second token is selected."""
    rng = torch.Generator().manual_seed(seed)
    masks = [[1, 1, 0, 1], [1, 1, 1, 1, 1], [1], [0, 0]]
    samples, columns = [], []
    for mask in masks:
        keep = torch.tensor(mask) != 0
        old = -(torch.randn(len(mask), generator=rng, dtype=torch.float64).exp()) - 0.01
        p = (old + scale * torch.randn(len(mask), generator=rng, dtype=torch.float64)).clamp(max=-0.001)
        # What fp32 holds, so that both sides decide alike.
        old, p = old.float().double(), p.float().double()
        advantage = torch.randn(1, generator=rng, dtype=torch.float64).float().double().item()
        samples.append((p[keep], old[keep], advantage))
        columns.append([c.masked_fill(~keep, torch.nan) for c in (p, old, torch.full_like(p, advantage))])
    p, old, advantages = (torch.cat(column).float() for column in zip(*columns, strict=True))
    selected = torch.arange(len(p)) % 2
    micro = _make_micro(
        [[float(x) for x in mask] for mask in masks],
        old_log_probs=old,
        advantages=advantages,
        selected=selected.float(),
    )
    return OffPolicy(micro, p.tolist(), samples)


@pytest.fixture(scope="session")
def off_policy() -> Callable[..., OffPolicy]:
    return _off_policy
