"""The trainer's distribution is the one that the engine drew from, token by token."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_llama import tiny_llama
from tolerance import log_prob_error

from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.config.rollout import RolloutArguments
from miles.engine.base import SamplingParams
from miles.engine.embedded.torch_engine import TorchEngine
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.rollout.groups import GroupSpec, generate_group, sampling_params
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.training.fsdp.models import Policy
from miles.training.packed_attention import NAME
from miles.training.trainer import policy_role
from miles.types.sample import Prompt, PromptGroup

CPU = torch.device("cpu")
TEMPERATURE = 0.8
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37))]
SAMPLING = {
    "top-p": dict(rollout_top_p=0.8),
    "top-k": dict(rollout_top_k=5),
    "min-p": dict(rollout_min_p=0.2),
    "all three": dict(rollout_top_p=0.95, rollout_top_k=20, rollout_min_p=0.02),
}


class Words:
    """A tokenizer without text."""

    def decode(self, token_ids, *, skip_special_tokens):
        return ""


def model(**fields):
    return tiny_llama(0, vocab_size=300, max_position_embeddings=64, initializer_range=0.4, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def policy(folder):
    made = Policy(model(attn_implementation=NAME), TEMPERATURE, 7)
    made.language_model.load_state_dict(model().state_dict())
    return made


def sampling_of(**fields: object) -> SamplingParams:
    return sampling_params(RolloutArguments(rollout_max_response_len=12, rollout_temperature=TEMPERATURE, **fields))


async def generated(engine, sampling):
    groups = [PromptGroup(i, Prompt("", prompt)) for i, prompt in enumerate(PROMPTS)]
    spec = GroupSpec(sampling, 3, lambda group, k: 100 * group + k)
    results = await asyncio.gather(*(generate_group(group, engine, Words(), spec) for group in groups))
    for group in results:
        for sample in group.samples:
            sample.reward = float(sample.response_ids[0] % 3)
    return results


def generate(folder, sampling):
    async def run():
        engine = TorchEngine(folder, torch.float32, "cpu", 4)
        try:
            return await generated(engine, sampling)
        finally:
            await engine.close()

    return asyncio.run(run())


def scored(policy, groups, supports="required"):
    loss = LossArguments(get_mismatch_metrics=True, entropy_coef=0.01)
    (batch,) = convert(groups, loss=loss, global_batch_size=9, supports=supports)
    micro = collate(batch, range(9), CPU)
    return loss, micro, policy.scorer(micro)(with_entropy=True)


@pytest.mark.parametrize("fields", SAMPLING.values(), ids=SAMPLING)
def test_log_probs_agree_and_without_replay_every_ratio_is_the_mass_that_was_kept(folder, policy, fields):
    """So is the mean ratio, which is 1 between two distributions over the same tokens."""
    groups = generate(folder, sampling_of(**fields))
    _, micro, scores = scored(policy, groups)
    whole = [sample.tokens for group in groups for sample in group.samples]
    error = 2 * log_prob_error(model(), whole, TEMPERATURE)
    assert error < 2e-3
    assert (scores.log_probs - micro.rollout_log_probs).abs().max() <= error
    sizes = torch.tensor([size for g in groups for s in g.samples for size in s.support.sizes.tolist()])
    assert (sizes >= 1).all() and sizes.double().mean() > 1.5, "something is left to draw from"

    _, micro, scores = scored(policy, groups, "left out")
    ratios = (scores.log_probs - micro.rollout_log_probs).exp()
    sets = [one for g in groups for s in g.samples for one in s.support.sets()]
    masses = []
    for sample in (s for g in groups for s in g.samples):
        plain = model()(input_ids=torch.tensor([sample.tokens])).logits[0, len(sample.prompt.token_ids) - 1 : -1]
        probs = (plain.double() / TEMPERATURE).softmax(-1)
        masses += [p.sum() if s is None else p[s].sum() for p, s in zip(probs, sample.support.sets(), strict=True)]
    masses = torch.stack(masses)
    assert len(sets) == len(masses) == len(ratios)
    torch.testing.assert_close(ratios.double(), masses, atol=0, rtol=error)
    assert ratios.mean() < 0.97 and abs(ratios.mean() - masses.mean()) < error


def test_the_first_step_has_ratios_of_one_and_a_gradient_within_the_support(folder, policy):
    """Tokens that could not be drawn have no gradient on their own: their logits have no part in the loss."""
    groups = generate(folder, sampling_of(rollout_top_k=3))
    loss, micro, _ = scored(policy, groups)
    role = policy_role(SimpleNamespace(optimizer=None), build_objective(loss))
    output = role.loss_function(micro, policy.scorer(micro))
    policy.zero_grad()
    output.loss.backward()
    count = micro.loss_mask.sum()
    error = 2 * log_prob_error(model(), [s.tokens for g in groups for s in g.samples], TEMPERATURE)
    assert output.metrics["is_ratio"] == pytest.approx(1.0, abs=error)
    assert output.metrics["train_rollout_logprob_abs_diff"] < error and count == 9 * 12
    drawable = {t for g in groups for s in g.samples for one in s.support.sets() for t in one.tolist()}
    head = policy.language_model.lm_head.weight.grad
    has_gradient = set((head.abs().sum(1) > 0).nonzero()[:, 0].tolist())
    assert has_gradient <= drawable and len(drawable) < 300 and len(has_gradient) > 20
    policy.zero_grad()


def test_greedy_and_unrestricted_sampling_have_no_support(folder):
    for fields in (dict(), dict(rollout_top_p=0.8, no_support_replay=True)):
        assert not sampling_of(**fields).returns_support
        groups = generate(folder, sampling_of(**fields))
        assert all(sample.support is None for group in groups for sample in group.samples)
    greedy = sampling_params(RolloutArguments(rollout_max_response_len=4, rollout_temperature=0.0, rollout_top_k=3))
    assert not greedy.returns_support


def test_an_interrupted_response_keeps_the_support_of_both_parts(folder):
    async def run():
        engine = InterruptibleEngine(TorchEngine(folder, torch.float32, "cpu", 16))
        try:
            work = asyncio.create_task(generated(engine, sampling_of(rollout_top_k=4)))
            while not engine._engine._batch.sequences:
                await asyncio.sleep(0)
            await engine.abort()
            return await work
        finally:
            await engine.close()

    for group in asyncio.run(run()):
        for sample in group.samples:
            sample.check()
            assert len(sample.support) == 12 and (sample.support.sizes <= 4).all()


def test_samples_without_a_support_are_refused_where_others_have_one(folder):
    groups = generate(folder, sampling_of(rollout_top_k=4))
    lacking = replace(groups[1].samples[0], support=None)
    groups[1].samples[0] = lacking
    for supports in ("if given", "required"):
        with pytest.raises(ValueError, match="trajectory 3 of group 1 does not say .*--no-support-replay"):
            convert(groups, loss=LossArguments(), global_batch_size=9, supports=supports)
    groups[1].samples[0] = replace(lacking, loss_mask=[0] * 12)
    (batch,) = convert(groups, loss=LossArguments(), global_batch_size=9)
    assert (batch.supports[3].sizes == -1).all()


def test_a_token_outside_its_support_is_refused(folder):
    sample = generate(folder, sampling_of(rollout_top_k=4))[0].samples[0]
    sample.response_ids[2] = next(t for t in range(300) if t not in sample.support.sets()[2])
    with pytest.raises(ValueError, match="support lacks a response token"):
        sample.check()
