"""The trainer computes each token with the experts that generated it."""

import asyncio

import numpy as np
import pytest
import torch
from tiny_kinds import LINEAR, MAMBA, SHARED
from tiny_llama import SHAPE, tiny_llama
from tolerance import log_prob_error
from transformers import AutoConfig, AutoModelForCausalLM

from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.embedded.torch_engine import TorchEngine
from miles.models.packing import WITH_KNOWN_ROUTERS
from miles.models.routers import WEIGHTS, Routers
from miles.objective.settings import LossArguments
from miles.rollout.debug_data import load_rollout, save_rollout
from miles.rollout.trajectory import Trajectory
from miles.training.fsdp.models import Policy, load_model
from miles.types.replay import at_tokens, continued, dtype_for
from miles.types.sample import Prompt, PromptGroup, Sample

CPU = torch.device("cpu")
TOKENS = 10
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37))]
WIDTH = dict(vocab_size=64, max_position_embeddings=64, initializer_range=0.3)
SIGMOID = dict(
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
    routed_scaling_factor=1.7,
)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=6)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
# Attention sees all keys: which of two equal scores an indexer takes is not defined.
DENSE = dict(num_key_value_heads=4, index_n_heads=4, index_head_dim=16, index_topk=64, **SIGMOID)
MODELS = {
    "qwen3_moe": EXPERTS,
    "qwen3_next": LINEAR | SHARED | EXPERTS,
    "qwen3_5_moe_text": LINEAR | SHARED | EXPERTS,
    "nemotron_h": MAMBA | SIGMOID,
    "deepseek_v32": DENSE | LATENT,
    "glm_moe_dsa": DENSE | LATENT | dict(indexer_types=["full", "shared"]),
    "glm4_moe": SIGMOID,
    "glm4_moe_lite": dict(num_key_value_heads=4, mlp_layer_types=["sparse", "dense"], **SIGMOID, **LATENT),
    "deepseek_v3": dict(num_key_value_heads=4, **SIGMOID, **LATENT),
}


def saved(kind, tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | WIDTH | MODELS[kind])))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    path = tmp_path_factory.mktemp(kind)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=[kind for kind, given in MODELS.items() if "n_group" in given])
def sigmoid_folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory):
    return saved("qwen3_moe", tmp_path_factory)


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    )


def generate(folder, spoil=None, seeds=2):
    """Return the groups of every prompt; ``spoil`` changes the engine's model first."""

    async def run():
        engine = TorchEngine(folder, torch.float32, "cpu", 4)
        if spoil is not None:
            spoil(engine._runner.model)
        sampling = SamplingParams(TOKENS, returns_experts=True)
        try:
            requests = [GenerationRequest(prompt, tuple(range(seeds)), sampling) for prompt in PROMPTS]
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            await engine.close()

    groups = []
    for index, (ids, generations) in enumerate(zip(PROMPTS, asyncio.run(run()), strict=True)):
        prompt = Prompt("", ids)
        samples = [
            Sample(
                prompt, index, 2 * index + k, g.token_ids, "", [1] * TOKENS, g.log_probs, reward=k, experts=g.experts
            )
            for k, g in enumerate(generations)
        ]
        for sample in samples:
            sample.check()
        groups.append(PromptGroup(index, prompt, samples))
    return groups


def scored(folder, groups, with_experts):
    (batch,) = convert(groups, loss=LossArguments(), global_batch_size=6, with_experts=with_experts)
    micro = collate(batch, range(6), CPU)
    policy = Policy(load_model(folder, torch.float32), 1.0, 7)
    policy.routers = Routers(policy.language_model, "--use-rollout-routing-replay")
    with torch.no_grad():
        return micro, policy.scorer(micro)(with_entropy=False).log_probs


def test_the_engine_says_which_experts_it_chose(folder):
    """In prefill and decoding, for all tokens but the last; a layer without experts has zeros."""
    model = plain(folder)
    routers = Routers(model, "--flag")
    for sample in (s for group in generate(folder) for s in group.samples):
        with torch.no_grad(), routers.recording():
            model(input_ids=torch.tensor([sample.tokens]))
        expected = routers.take_numpy()[:-1]
        assert sample.experts.shape == expected.shape == (len(sample.tokens) - 1, model.config.num_hidden_layers, 2)
        assert sample.experts.dtype == np.uint8
        # Two experts may have the same score in fp32.
        same = np.sort(sample.experts, -1) == np.sort(expected, -1)
        assert same.mean() > 0.99


def change_choice(model):
    """Make the routers choose other experts, with the same weights for each expert."""
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            torch.manual_seed(5)
            module.e_score_correction_bias.normal_()


def test_log_probs_agree_though_the_trainer_would_choose_other_experts(sigmoid_folder):
    groups = generate(sigmoid_folder, change_choice)
    error = 8 * log_prob_error(plain(sigmoid_folder), [s.tokens for g in groups for s in g.samples])
    micro, replayed = scored(sigmoid_folder, groups, with_experts=True)
    _, own = scored(sigmoid_folder, groups, with_experts=False)
    assert (replayed - micro.rollout_log_probs).abs().max() <= error
    assert (own - micro.rollout_log_probs).abs().max() > 10 * error


def test_without_a_difference_replay_changes_nothing(folder):
    groups = generate(folder)
    micro, replayed = scored(folder, groups, with_experts=True)
    assert micro.experts.dtype == torch.int16
    assert (micro.experts[micro.token_index] >= 0).all(), "the engine has read what the trainer reads"
    error = 8 * log_prob_error(plain(folder), [s.tokens for g in groups for s in g.samples])
    assert (replayed - micro.rollout_log_probs).abs().max() <= error


@pytest.fixture
def groups(one_folder):
    return generate(one_folder)


def test_prefixes_with_other_experts_are_not_shared(groups):
    def tokens():
        (batch,) = convert(groups, loss=LossArguments(), global_batch_size=6, with_experts=True)
        return len(collate(batch, range(6), CPU).token_index.unique())

    def prefixes():
        """Each prefix of a sample that the trainer reads, with the experts of its tokens, once."""
        return {
            (ids[:end], sample.experts[:end].tobytes())
            for group, prompt in zip(groups, PROMPTS, strict=True)
            for sample in group.samples
            for ids in [(*prompt, *sample.response_ids)]
            for end in range(1, len(ids))
        }

    shared = tokens()
    assert shared == len(prefixes()) <= sum(map(len, PROMPTS)) + 6 * TOKENS, "prompts are kept once"
    other = groups[2].samples[1].experts.copy()
    other[3] = other[3][:, ::-1]
    groups[2].samples[1].experts = other
    assert tokens() == len(prefixes()) >= shared + len(PROMPTS[2]) - 3, "from the fourth token of the prompt on"


def test_samples_without_experts_are_refused(groups):
    experts = groups[1].samples[0].experts
    for replacement in (None, experts[:-1]):
        groups[1].samples[0].experts = replacement
        with pytest.raises(ValueError, match="--use-rollout-routing-replay: trajectory 2 of group 1 does not say"):
            convert(groups, loss=LossArguments(), global_batch_size=6, with_experts=True)
    groups[1].samples[0].loss_mask[-1] = 0  # whose token alone needs the missing one
    convert(groups, loss=LossArguments(), global_batch_size=6, with_experts=True)


def test_experts_are_saved_with_the_samples(groups, tmp_path):
    template = str(tmp_path / "{iteration}.jsonl")
    save_rollout(template, 0, groups)
    for group, loaded in zip(groups, load_rollout(template, 0), strict=True):
        for sample, other in zip(group.samples, loaded.samples, strict=True):
            assert np.array_equal(sample.experts, other.experts) and sample.experts.dtype == other.experts.dtype


def test_a_second_turn_keeps_the_experts_of_the_first(one_folder):
    class Words:
        def encode(self, text, *, add_special_tokens):
            return [3, 4]

        def decode(self, ids, *, skip_special_tokens):
            return ""

    async def run():
        engine = TorchEngine(one_folder, torch.float32, "cpu", 4)
        try:
            sampling = SamplingParams(12, returns_experts=True)
            trajectory = Trajectory(Sample(Prompt("", (5, 6)), 0, 0), Words(), engine, sampling, lambda turn: turn)
            await trajectory.generate(max_new_tokens=4)
            first = trajectory.sample.experts
            trajectory.append("tool")
            await trajectory.generate(max_new_tokens=3)
            trajectory.append("tool")
            return first, trajectory.sample
        finally:
            await engine.close()

    first, sample = asyncio.run(run())
    sample.check()
    assert len(first) == 5 and len(sample.experts) == 2 + 4 + 2 + 3 - 1 and len(sample.tokens) == 13
    assert np.array_equal(sample.experts[:5], first)


def test_positions_keep_their_first_choice():
    first, more = np.zeros((2, 1, 1), np.uint8), np.ones((5, 1, 1), np.uint8)
    assert continued(None, more) is more and continued(first, None) is first
    assert continued(first, more)[:, 0, 0].tolist() == [0, 0, 1, 1, 1]
    experts = at_tokens([first, more], np.array([1, 0, 0, -1]), np.array([4, 1, 2, 0]))
    assert experts[:, 0, 0].tolist() == [1, 0, -1, -1] and experts.dtype == np.int16
    assert dtype_for(256) is np.uint8 and dtype_for(257) is np.int16


def test_validation_knows_the_same_routers():
    assert {*WITH_KNOWN_ROUTERS} == WEIGHTS.keys()
    assert WEIGHTS.keys() - MODELS.keys() == {"qwen3_5_moe"}, "qwen3_5_moe_text inside a configuration of several parts"


def test_a_model_without_known_routers_is_refused():
    with pytest.raises(ValueError, match="--flag: the routers of qwen3_moe, .* and this model is llama; drop --flag"):
        Routers(tiny_llama(0), "--flag")
