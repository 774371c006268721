"""Nothing is read back from the device while a loss is computed: on a GPU, that would wait for all of its work.

PyTorch's ``meta`` device has shapes and no values, so reading one raises there, as does arithmetic with a tensor on the
host. Indexing by a host tensor is not noticed.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama

from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.objective.aggregation import Aggregation
from miles.objective.chosen import build_objective
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.settings import LossArguments
from miles.training.fsdp.models import Policy, ValueModel
from miles.training.packed_attention import NAME
from miles.training.trainer import critic_role, policy_role
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch

META = torch.device("meta")
DIVISOR = {"constant": 7.0, "delta_l": 7.0}
REFERENCE = dict(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
CORRECTED = dict(use_tis=True, tis_level="sequence", use_rs=True, use_opsm=True, get_mismatch_metrics=True)
LOSSES = {
    **{name: dict(policy_loss=name) for name in POLICY_LOSSES},
    **{m: dict(loss_aggregation=m, loss_aggregation_divisor=DIVISOR.get(m)) for m in get_args(Aggregation)},
    "KL and entropy": REFERENCE,
    "corrections": CORRECTED,
}


def batch_of(loss: LossArguments) -> TrainBatch:
    """Return a step of four scored samples, two of each prompt; the last is too long for the short-row attention."""
    rng = np.random.default_rng(0)
    groups = []
    for index, (prompt_length, responses) in enumerate(((4, (6, 9)), (3, (2, 150)))):
        prompt = Prompt("", tuple(rng.integers(0, 64, prompt_length).tolist()))
        samples = [
            Sample(prompt, index, 2 * index + i, rng.integers(0, 64, n).tolist(), "", [1] * n, [-1.0] * n, reward=i)
            for i, n in enumerate(responses)
        ]
        groups.append(PromptGroup(index, prompt, samples))
    (batch,) = convert(groups, loss=loss, global_batch_size=4)
    scores = [np.full(n, -1.0, np.float32) for n in batch.response_lengths]
    return replace(batch, old_log_probs=scores, ref_log_probs=scores, values=scores, returns=scores, advantages=scores)


@pytest.mark.parametrize("row_multiple", [None, 1], ids=["packed", "padded"])
@pytest.mark.parametrize("fields", LOSSES.values(), ids=LOSSES)
def test_the_policy(fields, row_multiple):
    loss = LossArguments(**fields)
    policy = Policy(tiny_llama(0, attn_implementation=NAME), 0.7, 64).to(META)
    role = policy_role(SimpleNamespace(optimizer=None), build_objective(loss))
    micro = collate(batch_of(loss), range(4), META, row_multiple=row_multiple)
    output = role.loss_function(micro, policy.scorer(micro, watched=True))
    output.loss.backward()
    assert all(metric.device == META for metric in output.metrics.values())
    assert all(p.grad is not None and p.grad.device == META for p in policy.parameters())


def test_the_critic():
    loss = LossArguments(advantage_estimator="ppo")
    critic = ValueModel(tiny_llama(0, attn_implementation=NAME).base_model).to(META)
    micro = collate(batch_of(loss), range(4), META)
    output = critic_role(SimpleNamespace(optimizer=None), loss).loss_function(micro, critic.scorer(micro))
    output.loss.backward()
    assert all(metric.device == META for metric in output.metrics.values())


def test_reading_a_value_is_noticed():
    with pytest.raises(RuntimeError):
        torch.zeros(2, device=META).sum().item()
    with pytest.raises(NotImplementedError):
        torch.zeros(2, device=META).cpu()
    with pytest.raises(RuntimeError):
        torch.zeros(2, device=META) + torch.zeros(2)
