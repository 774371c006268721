"""Compare the embedded engine with transformers, and follow a request from start to end."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tolerance import log_prob_error, rounding_error
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from miles.engine.base import GenerationRequest, SamplingParams, WeightChunk
from miles.engine.embedded.attention import KVCache
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.torch_engine import TorchEngine
from miles.models.packing import kv_bytes_per_token

torch.set_num_threads(1)
SHAPE = dict(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.5,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "deepseek_v3": DeepseekV3Config(  # values are narrower than keys
        **(SHAPE | {"num_key_value_heads": 4, "head_dim": 4}),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
}
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37)), (5, 6, 8), (1, 2)]


@pytest.fixture(scope="module", params=CONFIGS)
def model_path(request, tmp_path_factory):
    return save(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    return save(CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


def save(config, folder):
    torch.manual_seed(0)
    random_model(config).save_pretrained(folder)
    return str(folder)


def random_model(config):
    model = AutoModelForCausalLM.from_config(config)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_()
    return model


def make_engine(path, max_batch_size=64):
    return TorchEngine(path, torch.float32, "cpu", max_batch_size)


def requests(sampling, seeds=(0, 1, 2), prompts=PROMPTS):
    return [GenerationRequest(p, tuple(seeds), sampling) for p in prompts]


async def generate_all(engine, reqs):
    return await asyncio.gather(*(engine.generate(r) for r in reqs))


async def responses(engine, reqs):
    return [[g.token_ids for g in group] for group in await generate_all(engine, reqs)]


async def tokens_generated(engine, count):
    """Wait until a running sequence has ``count`` tokens, checked between turns of the loop."""
    while not any(len(s.token_ids) >= count for s in engine._batch.sequences):
        await asyncio.sleep(0)


async def test_greedy_responses_equal_those_of_transformers(model_path):
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    got = await responses(make_engine(model_path), requests(SamplingParams(40, temperature=0), seeds=(0,)))
    for prompt, [response] in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)
        assert response == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_log_probs_are_those_of_a_transformers_forward(model_path, temperature):
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    groups = await generate_all(make_engine(model_path), requests(SamplingParams(70, temperature, 0.9)))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group:
            ids = torch.tensor([[*prompt, *response.token_ids]])
            with torch.no_grad():
                logits = reference(ids).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            tolerance = log_prob_error(reference, ids, temperature)
            torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=tolerance, rtol=0)
            assert (response.finish_reason, len(response.token_ids)) == ("length", 70)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_response_does_not_depend_on_its_batch(llama_path, temperature):
    reqs = requests(SamplingParams(20, temperature, stop_token_ids=tuple(range(0, 256, 16))))
    together = await responses(make_engine(llama_path), reqs)
    assert (await responses(make_engine(llama_path), reqs[::-1]))[::-1] == together
    assert await responses(make_engine(llama_path, max_batch_size=4), reqs) == together
    assert [(await responses(make_engine(llama_path), [r]))[0] for r in reqs] == together


async def test_sequences_with_equal_tokens_share_a_row(llama_path, monkeypatch):
    """At a low temperature many responses begin alike. Sequences that have ended take no row."""
    engine, rows = make_engine(llama_path), []
    decode = engine._runner.decode
    monkeypatch.setattr(engine._runner, "decode", lambda t, *a: rows.append(len(t)) or decode(t, *a))
    sampling = SamplingParams(20, temperature=0.1, stop_token_ids=tuple(range(0, 256, 16)))
    groups = await responses(engine, requests(sampling, seeds=range(8)))
    expected = [
        len({(prompt, tuple(r[:n])) for prompt, group in enumerate(groups) for r in group if len(r) > n})
        for n in range(1, max(len(r) for group in groups for r in group))
    ]
    assert rows == expected and rows[0] < 8 * len(groups)
    alone = [(await responses(engine, requests(sampling, seeds=(s,))))[2] for s in range(8)]
    assert [response for [response] in alone] == groups[2]


async def test_seeds_repeat_and_differ(llama_path):
    [[a, b, again]] = await responses(make_engine(llama_path), requests(SamplingParams(12), (3, 4, 3), PROMPTS[:1]))
    assert a == again
    assert a != b


async def test_stop_tokens_end_a_response_and_stay_in_it(llama_path):
    engine = make_engine(llama_path, max_batch_size=5)
    engine._runner.eos_ids = frozenset(range(0, 64))
    stops = frozenset(range(0, 128))
    sampling = SamplingParams(30, stop_token_ids=tuple(range(64, 128)))
    groups = await generate_all(engine, requests(sampling, seeds=range(8)))
    reasons = set()
    for response in (r for group in groups for r in group):
        assert not stops.intersection(response.token_ids[:-1])
        assert (response.token_ids[-1] in stops) == (response.finish_reason == "stop")
        assert len(response.token_ids) == len(response.log_probs) <= 30
        reasons.add(response.finish_reason)
    assert "stop" in reasons
    assert not engine._batch.sequences


async def test_the_batch_never_exceeds_its_size_and_a_prompt_is_prefilled_once(llama_path, monkeypatch):
    engine = make_engine(llama_path, max_batch_size=6)
    rows, prefilled = [], []
    decode, prefill = engine._runner.decode, engine._runner.prefill
    monkeypatch.setattr(engine._runner, "decode", lambda t, *a: rows.append(len(t)) or decode(t, *a))
    monkeypatch.setattr(engine._runner, "prefill", lambda p, *a, **k: prefilled.extend(p) or prefill(p, *a, **k))
    await responses(engine, requests(SamplingParams(5)))
    assert max(rows) == 6
    # Two groups of three fit at once, so no group is split.
    assert sorted(prefilled) == sorted(PROMPTS)


async def test_the_cache_has_the_size_that_the_configuration_says(model_path, monkeypatch):
    """host_share.py chooses the size of the batch by it, before there is a model."""
    engine, sizes = make_engine(model_path, max_batch_size=3), []
    clear = KVCache.clear

    def measured(cache):
        sizes.append(sum(buffer.nbytes for pair in cache._layers.values() for buffer in pair))
        clear(cache)

    monkeypatch.setattr(KVCache, "clear", measured)
    await responses(engine, requests(SamplingParams(max_new_tokens=60), prompts=PROMPTS[2:3]))
    config = json.loads((Path(model_path) / "config.json").read_text())
    per_token = kv_bytes_per_token(config, gpus=1, itemsize=4, keeps_latent=False)
    assert max(sizes) == 3 * 128 * per_token, "17 + 60 tokens in steps of 64"


def test_the_cache_grows_up_to_the_longest_sequence():
    cache, widths = KVCache(), []
    cache.expect(150)
    cache.expect(180)
    for width in (100, 129, 192, 193):
        cache.reserve(1, width)
        widths.append(cache._width)
    assert widths == [128, 192, 192, 256], "doubled would be 256; there is always room for what is reserved"


async def test_abort_returns_the_tokens_so_far(llama_path):
    engine = make_engine(llama_path, max_batch_size=2)
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests(SamplingParams(100), seeds=(0,))]
    await tokens_generated(engine, 3)
    await engine.abort()
    aborted = [r for group in await asyncio.gather(*tasks) for r in group]
    whole = await generate_all(engine, requests(SamplingParams(100), seeds=(0,)))
    assert {r.finish_reason for r in aborted} == {"abort"}
    assert [len(r.token_ids) > 0 for r in aborted] == [True, True, False, False, False]
    for partial, [full] in zip(aborted, whole, strict=True):
        assert full.token_ids[: len(partial.token_ids)] == partial.token_ids


async def test_a_failure_reaches_every_caller_and_the_engine_recovers(llama_path, monkeypatch):
    engine = make_engine(llama_path, max_batch_size=4)
    reqs = requests(SamplingParams(6))
    expected = await responses(engine, reqs)

    def fail(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", fail)
        errors = await asyncio.gather(*(engine.generate(r) for r in reqs), return_exceptions=True)
        assert [type(e) for e in errors] == [MemoryError] * len(reqs)
    assert await responses(engine, reqs) == expected


async def test_a_cancelled_caller_frees_its_rows(llama_path):
    engine = make_engine(llama_path, max_batch_size=3)
    gone = asyncio.create_task(engine.generate(GenerationRequest((1, 2), (0, 1, 2), SamplingParams(120))))
    await tokens_generated(engine, 2)
    gone.cancel()
    [response] = await engine.generate(GenerationRequest((3, 4), (0,), SamplingParams(2)))
    assert len(response.token_ids) == 2
    assert not engine._batch.sequences


async def test_update_weights_replaces_the_model(model_path, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(model_path).config
    torch.manual_seed(1)
    other = random_model(config)
    other.save_pretrained(tmp_path)
    reqs = requests(SamplingParams(10))
    biases = [(name, b) for name, b in other.named_buffers() if name in other.state_dict()]
    named = [*other.named_parameters(), *biases]  # without lm_head.weight if it is tied
    chunks = [WeightChunk({name: p.double()}) for name, p in named]
    engine = make_engine(model_path)
    [[first]] = await generate_all(engine, requests(SamplingParams(3), (0,), PROMPTS[:1]))
    await engine.update_weights(iter(chunks), version=7)
    groups = await generate_all(engine, reqs)
    assert first.weight_version == 0
    assert {g.weight_version for group in groups for g in group} == {7}
    assert [[g.token_ids for g in group] for group in groups] == await responses(make_engine(str(tmp_path)), reqs)


async def test_tokens_have_the_version_of_the_weights_that_generated_them(llama_path):
    same = dict(AutoModelForCausalLM.from_pretrained(llama_path).named_parameters())
    engine = make_engine(llama_path)
    running = asyncio.create_task(generate_all(engine, requests(SamplingParams(30))))
    for version in (4, 9):
        await tokens_generated(engine, version)
        await engine.update_weights([WeightChunk(same)], version)
    for response in (r for group in await running for r in group):
        versions = response.token_versions
        assert len(versions) == 30
        assert versions == sorted(versions)
        assert set(versions) == {0, 4, 9}
        assert response.weight_version == 9


async def test_a_request_during_a_weight_update_waits_for_it(llama_path):
    weights = dict(AutoModelForCausalLM.from_pretrained(llama_path).named_parameters())

    def chunks(asked, arrives, fails):
        asked.set()
        assert arrives.wait(60)
        yield WeightChunk({} if fails else weights)

    async def generated_during_an_update(engine, fails):
        asked, arrives = threading.Event(), threading.Event()
        update = asyncio.create_task(engine.update_weights(chunks(asked, arrives, fails), version=5))
        assert await asyncio.to_thread(asked.wait, 60)
        running = asyncio.create_task(generate_all(engine, requests(SamplingParams(3))))
        await asyncio.sleep(0.05)
        assert not running.done()
        arrives.set()
        return await asyncio.gather(update, running, return_exceptions=True)

    _, groups = await generated_during_an_update(make_engine(llama_path), fails=False)
    assert {version for group in groups for response in group for version in response.token_versions} == {5}
    refused, error = await generated_during_an_update(make_engine(llama_path), fails=True)
    assert isinstance(refused, ValueError)
    assert isinstance(error, RuntimeError) and "the last weight update failed" in str(error)


async def test_requests_in_flight_end_with_a_weight_update_that_fails(llama_path):
    """The model has weights of both versions then."""
    weights = dict(AutoModelForCausalLM.from_pretrained(llama_path).named_parameters())
    engine = make_engine(llama_path)
    running = asyncio.create_task(generate_all(engine, requests(SamplingParams(100))))
    await tokens_generated(engine, 3)
    with pytest.raises(ValueError, match="lacks"):
        await engine.update_weights([WeightChunk({"model.norm.weight": weights["model.norm.weight"]})], 1)
    with pytest.raises(RuntimeError, match="the last weight update failed"):
        await asyncio.wait_for(running, 60)
    await engine.update_weights([WeightChunk(weights)], 2)
    assert {r.weight_version for group in await generate_all(engine, requests(SamplingParams(2))) for r in group} == {2}


async def test_logits_that_are_no_numbers_are_named(llama_path):
    """Every row would draw token 0."""
    weights = {k: v.clone() for k, v in AutoModelForCausalLM.from_pretrained(llama_path).state_dict().items()}
    engine = make_engine(llama_path)
    name = "model.norm.weight"
    await engine.update_weights([WeightChunk({**weights, name: torch.full_like(weights[name], torch.nan)})], 3)
    with pytest.raises(FloatingPointError, match="not numbers, with weights of version 3"):
        await responses(engine, requests(SamplingParams(5)))
    await engine.update_weights([WeightChunk(weights)], 4)
    assert await responses(engine, requests(SamplingParams(5))) == await responses(
        make_engine(llama_path), requests(SamplingParams(5))
    )


async def test_wrong_weight_updates_name_the_fault(llama_path):
    engine = make_engine(llama_path)
    weights = {k: v.clone() for k, v in AutoModelForCausalLM.from_pretrained(llama_path).state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"

    async def update(tensors):
        await engine.update_weights([WeightChunk(tensors)], 1)

    with pytest.raises(ValueError, match=name):
        await update({k: v for k, v in weights.items() if k != name})
    with pytest.raises(RuntimeError, match="weight update"):
        await responses(engine, requests(SamplingParams(1)))
    with pytest.raises(ValueError, match="model.layers.9.weight"):
        await update({**weights, "model.layers.9.weight": weights[name]})
    with pytest.raises(ValueError, match=rf"{name} of shape \(32, 64\).*\(64, 32\)"):
        await update({**weights, name: weights[name].T})
    await update(weights)
    assert await responses(engine, requests(SamplingParams(1)))


async def test_experts_may_be_sent_one_by_one(tmp_path):
    """As in a checkpoint; transformers keeps all experts of a layer in one tensor."""
    torch.manual_seed(2)
    config = CONFIGS["qwen3_moe"]
    first, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    first.save_pretrained(tmp_path / "first")
    other.save_pretrained(tmp_path / "other")
    saved = load_file(tmp_path / "other" / "model.safetensors")
    engine, reqs = make_engine(str(tmp_path / "first")), requests(SamplingParams(6))
    with pytest.raises(ValueError, match="lacks model.layers.1.mlp.experts.gate_up_proj"):
        incomplete = {n: t for n, t in saved.items() if n != "model.layers.1.mlp.experts.3.up_proj.weight"}
        await engine.update_weights([WeightChunk(incomplete)], 1)
    with pytest.raises(ValueError, match="experts.4.up_proj"):
        unknown = {"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(16, 32)}
        await engine.update_weights([WeightChunk(saved | unknown)], 1)
    await engine.update_weights([WeightChunk(saved)], 1)
    assert await responses(engine, reqs) == await responses(make_engine(str(tmp_path / "other")), reqs)


async def test_requests_that_cannot_be_served_are_refused(llama_path):
    engine = make_engine(llama_path)
    for prompt, new, message in (
        ((1, 256), 1, "token id 256 .*vocabulary of 256"),
        ((-1,), 1, "token id -1"),
        ((), 1, "empty prompt"),
        ((1,) * 100, 29, "100 tokens and --rollout-max-response-len 29 make 129.*128"),
    ):
        with pytest.raises(ValueError, match=message):
            await responses(engine, requests(SamplingParams(new), (0,), [prompt]))
    assert await engine.generate(GenerationRequest((1,), (), SamplingParams(1))) == []


async def test_sequences_after_which_positions_would_change_are_refused(tmp_path):
    """Frequencies change then for all sequences of the batch, but not for their keys in the cache."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
    config = Phi3Config(**SHAPE, original_max_position_embeddings=16, rope_parameters=rope | factors)
    engine = make_engine(save(config, tmp_path))
    with pytest.raises(ValueError, match="2 tokens and .* 15 make 17, .* model's original_max_position_embeddings 16"):
        await responses(engine, requests(SamplingParams(15), (0,), [(1, 2)]))
    ((generation,),) = await generate_all(engine, requests(SamplingParams(14), (0,), [(1, 2)]))
    assert len(generation.token_ids) == 14


def test_layers_that_would_be_computed_otherwise_are_refused(tmp_path):
    windowed = Qwen2MoeConfig(**SHAPE, sliding_window=16, use_sliding_window=True, num_experts=4)
    conv = Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])
    capped = Gemma2Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 2)
    for config, message in (
        (windowed, "a qwen2_moe with a sliding window has not been compared"),
        (conv, "a lfm2 with layers of conv has not been compared"),
        (capped, "a gemma2 with capped scores has not been compared"),
    ):
        with pytest.raises(ValueError, match=rf"^--hf-checkpoint .*{message}.*choose another model"):
            make_engine(save(config, tmp_path / config.model_type))


async def test_close_ends_everything(llama_path):
    engine = make_engine(llama_path)
    running = asyncio.create_task(generate_all(engine, requests(SamplingParams(100))))
    await tokens_generated(engine, 2)
    await engine.close()
    assert {g.finish_reason for group in await running for g in group} == {"abort"}


def letters(token_ids):
    """Read two hexadecimal digits for each token."""
    return "".join(f"{token:02x}" for token in token_ids)


async def test_a_text_ends_a_response_with_the_token_that_completes_it(llama_path):
    free = SamplingParams(40)
    [wholes] = await generate_all(make_engine(llama_path), requests(free, seeds=range(4), prompts=PROMPTS[:1]))
    text = letters(wholes[0].token_ids)[15:18]  # of three tokens; the first and the last are in it by half
    engine = TorchEngine(llama_path, torch.float32, "cpu", 64, decode=letters)
    stopping = SamplingParams(40, stop_texts=("never", text))
    [generations] = await generate_all(engine, requests(stopping, seeds=range(4), prompts=PROMPTS[:1]))
    for whole, response in zip(wholes, generations, strict=True):
        place = letters(whole.token_ids).find(text)
        length = 40 if place < 0 else (place + len(text) + 1) // 2
        assert response.token_ids == whole.token_ids[:length]
        assert response.finish_reason == ("length" if length == 40 else "stop")
    assert len(generations[0].token_ids) <= 9


@pytest.mark.parametrize("config", ["llama", "tied"])
def test_an_fp32_head_computes_the_trainers_logits_of_bf16_hidden_states(config, tmp_path):
    """--fp32-lm-head: in prefill and decode, before and after an update of the weights."""
    base = CONFIGS["llama"]
    path = save(type(base)(**(base.to_dict() | {"tie_word_embeddings": config == "tied"})), tmp_path)
    runner = ModelRunner(path, torch.bfloat16, "cpu", fp32_head=True)
    seen = []
    runner.model.get_output_embeddings().register_forward_hook(lambda head, inputs, _: seen.append(inputs[0]))
    for scale in (1.0, 1.5):
        weights = {name: scale * p for name, p in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
        runner.load_weights([WeightChunk(weights)])
        head = runner.model.get_output_embeddings().weight.double()
        all_logits = [runner.prefill([[5, 6, 7], [9]], 0), runner.decode([3, 4], [3, 1], 4)]
        for hidden, logits in zip([inputs[:, -1] for inputs in seen], all_logits, strict=True):
            assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
            expected = hidden.double() @ head.t()
            size = float((hidden.double().abs() @ head.t().abs()).max())
            assert float((logits.double() - expected).abs().max()) < rounding_error(head.shape[1], size)
            assert not torch.equal(logits, logits.bfloat16().float())
        seen.clear()
        runner.cache.clear()


def test_a_start_that_prompts_share_is_run_once(llama_path, monkeypatch):
    start = list(range(30, 70))
    prompts = [[*start, 5, 6, 7], [*start, 9], [*start, 5, 8]]
    runner = ModelRunner(llama_path, torch.float32, "cpu")
    shapes, forward = [], runner._forward
    monkeypatch.setattr(runner, "_forward", lambda ids, *rest: shapes.append(tuple(ids.shape)) or forward(ids, *rest))
    all_logits = [*runner.prefill(prompts, 0)]
    runner.cache.reserve(4, 48)
    runner.cache.copy_rows([1], 3, 41)
    all_logits += runner.decode([11, 12, 14, 13], [43, 41, 42, 41], 48)
    assert shapes == [(1, 40), (3, 3), (4, 1)]
    reference = AutoModelForCausalLM.from_pretrained(llama_path, dtype=torch.float32)
    sequences = [*prompts, *([*prompts[p], token] for p, token in ((0, 11), (1, 12), (2, 14), (1, 13)))]
    tolerance = log_prob_error(reference, sequences)
    for sequence, logits in zip(sequences, all_logits, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([sequence])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("prompts", [[[*range(40), 5]], [[5, *range(40)], [6, *range(40)]], [[1] * 30, [1] * 31]])
def test_prompts_that_share_little_are_run_whole(prompts, llama_path, monkeypatch):
    runner = ModelRunner(llama_path, torch.float32, "cpu")
    shapes, forward = [], runner._forward
    monkeypatch.setattr(runner, "_forward", lambda ids, *rest: shapes.append(tuple(ids.shape)) or forward(ids, *rest))
    runner.prefill(prompts, 0)
    assert shapes == [(len(prompts), max(map(len, prompts)))]


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bf16 products, so no layer is fused"
)
@pytest.mark.parametrize("config", ["llama", "qwen2", "qwen3"])
def test_fused_layers_round_no_more_than_those_of_transformers(config, tmp_path):
    """In bf16; the distance from the model in float64, over many logits."""
    path = save(type(CONFIGS[config])(**(CONFIGS[config].to_dict() | {"initializer_range": 0.2})), tmp_path)
    runner = ModelRunner(path, torch.bfloat16, "cpu")
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).double()
    rounded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    prompts = torch.randint(0, 256, (64, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = exact(prompts).logits[:, -1]
        theirs = rounded(prompts).logits[:, -1]
    assert runner._fused is not None
    ours = runner.prefill(prompts.tolist(), 0)
    error, usual = ((x.double() - expected).norm() for x in (ours, theirs))
    assert 0 < error < 1.1 * usual


def test_the_packed_weights_of_fused_layers_replace_the_models(llama_path):
    runner = ModelRunner(llama_path, torch.float32, "cpu")
    products = [m for m in runner.model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert len(products) == 2 * 7
    assert {m.weight.untyped_storage().nbytes() for m in products} == {4}
    assert products[0].weight.shape == (32, 32), "an update must bring a tensor of this shape"
