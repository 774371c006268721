"""One real SGLang server, started once for this module: what it generates, and how weights reach it."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.weight_sync.chunks import in_chunks
from miles.weight_sync.sender import WeightSender, check_equal
from tests.fast.engine.sglang_servers import LocalServer, engine_of

# Starting a server takes 12 s on two idle cores, and minutes on busy ones.
pytestmark = pytest.mark.timeout(600)

PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37))]


class Running:
    """An engine and the loop that it lives on."""

    def __init__(self, model, folder):
        self.loop = asyncio.new_event_loop()
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.server = LocalServer(0, model, folder)
        self.folder = folder
        self.vocab = self.model.config.vocab_size
        self.engine = engine_of([self.server], self.vocab, folder)
        self.run(self.engine.start())

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 500))

    def generate(self, prompts, seeds=1, **sampling):
        async def all_at_once():
            return await asyncio.gather(*(self.engine.generate(r) for r in requests))

        requests = [GenerationRequest(p, tuple(range(seeds)), SamplingParams(**sampling)) for p in prompts]
        return [generation for group in self.run(all_at_once()) for generation in group]

    def chunks(self, model=None):
        return list(in_chunks((model or self.model).named_parameters(), bucket_bytes=20_000))

    def use(self, sender):
        self.engine._sender = sender


@pytest.fixture(scope="module")
def running(tiny_model, tmp_path_factory):
    running = Running(tiny_model, tmp_path_factory.mktemp("servers"))
    yield running
    running.run(running.engine.close())


@pytest.fixture(scope="module")
def other_model(running):
    """A model of the same shape with other weights."""
    torch.manual_seed(7)
    other = AutoModelForCausalLM.from_config(running.model.config, dtype=torch.float32)
    return other.requires_grad_(False)


def log_probs_of(model, prompt, generation, temperature):
    ids = torch.tensor([[*prompt, *generation.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 20, 0.9)])
def test_log_probs_are_the_models(running, temperature, top_k, top_p):
    """Within 1e-4 in fp32, and of the whole vocabulary whatever is cut off."""
    given = {"max_new_tokens": 12, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    generations = running.generate(PROMPTS, seeds=4, **given)
    for prompt, generation in zip([p for p in PROMPTS for _ in range(4)], generations, strict=True):
        expected = log_probs_of(running.model, prompt, generation, temperature)
        assert torch.tensor(generation.log_probs).double() == pytest.approx(expected, abs=1e-4)


def test_greedy_repeats_and_follows_the_model(running):
    first, again = (running.generate(PROMPTS, max_new_tokens=8, temperature=0.0) for _ in range(2))
    assert [g.token_ids for g in first] == [g.token_ids for g in again]
    for prompt, generation in zip(PROMPTS, first, strict=True):
        assert torch.tensor(generation.log_probs) == pytest.approx(
            log_probs_of(running.model, prompt, generation, 1.0).float(), abs=1e-4
        )


def test_stop_token_ends_a_response_and_stays_in_it(running):
    free = running.generate(PROMPTS[:1], max_new_tokens=8, temperature=0.0)[0]
    stop = free.token_ids[3]
    ended = running.generate(PROMPTS[:1], max_new_tokens=8, temperature=0.0, stop_token_ids=(stop,))[0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (free.finish_reason, ended.finish_reason) == ("length", "stop")


@pytest.mark.parametrize("prompt", [(), (300_000,), (-1,)])
def test_wrong_prompt_is_told_before_a_server_sees_it(running, prompt):
    with pytest.raises(ValueError, match="prompt"):
        running.generate([prompt], max_new_tokens=1)
    assert running.run(running.engine.health())


def test_what_a_server_refuses_is_a_clear_stop(running):
    with pytest.raises(ValueError, match="/generate: HTTP 400"):
        running.generate([tuple([5] * 500)], max_new_tokens=1)  # longer than the model's context


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("mode", ["disk", "broadcast", "ipc"])
def test_weights_arrive_whole(running, other_model, tmp_path, mode, check):
    """Other weights, then the first again: greedy responses and log-probs are those of the weights sent."""
    flags = {"update_weight_transfer_mode": mode, "check_weight_update_equal": check}
    running.use(WeightSender(engine_flags(**flags), tmp_path))
    for version, model in ((11, other_model), (12, running.model)):
        running.run(running.engine.update_weights(running.chunks(model), version))
        for prompt, generation in zip(PROMPTS, running.generate(PROMPTS, max_new_tokens=6), strict=True):
            expected = log_probs_of(model, prompt, generation, 1.0)
            assert torch.tensor(generation.log_probs).double() == pytest.approx(expected, abs=1e-4)
            assert generation.weight_version == version and generation.earlier_versions == ()
    assert running.run(running.engine.health())


def engine_flags(**flags):
    from miles.arguments.sglang import SglangArguments

    return SglangArguments(**flags)


def test_tokens_know_the_weights_that_generated_them(running, other_model, tmp_path):
    """Weights change while responses are in flight: a token's log-prob is that of the model whose version it bears."""
    running.use(WeightSender(engine_flags(), tmp_path))
    running.run(running.engine.update_weights(running.chunks(), 16))

    def request(tokens):
        return GenerationRequest(PROMPTS[0], (0, 1, 2, 3), SamplingParams(max_new_tokens=tokens))

    async def scenario():
        whole = asyncio.ensure_future(running.engine.generate(request(100)))
        await running.engine.generate(request(10))  # so that the others have some tokens, and not all
        await running.engine.update_weights(running.chunks(other_model), 17)
        return await whole

    models = {16: running.model, 17: other_model}
    generations = running.run(scenario())
    for generation in generations:
        found = generation.token_versions
        assert found == sorted(found) and set(found) <= set(models)
        expected = {v: log_probs_of(model, PROMPTS[0], generation, 1.0) for v, model in models.items()}
        expected = [float(expected[version][i]) for i, version in enumerate(found)]
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    assert any(len(set(generation.token_versions)) == 2 for generation in generations)
    running.run(running.engine.update_weights(running.chunks(), 18))


def test_a_tensor_that_is_not_sent_is_found(running, tmp_path):
    running.use(WeightSender(engine_flags(check_weight_update_equal=True), tmp_path))
    missing = "model.layers.1.mlp.down_proj.weight"
    incomplete = list(in_chunks((n, p) for n, p in running.model.named_parameters() if n != missing))
    with pytest.raises(ValueError, match=f"--check-weight-update-equal: 1 of .*{missing}"):
        running.run(running.engine.update_weights(incomplete, 19))
    running.run(running.engine.resume())
    running.run(running.engine.update_weights(running.chunks(), 20))


def test_a_refused_broadcast_is_an_error_and_no_hang(running, other_model, tmp_path):
    running.use(WeightSender(engine_flags(), tmp_path))
    wrong = list(in_chunks((f"{name}", torch.zeros(3, 3)) for name, _ in other_model.named_parameters()))
    with pytest.raises(RuntimeError, match="did not take the weights: .*/update_weights_from_distributed"):
        running.run(running.engine.update_weights(wrong, 21))


def test_checksums_that_differ_are_named():
    check_equal("u", {"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    with pytest.raises(ValueError, match=r"2 of 2 tensors of the engine at u .*\(b, c\)"):
        check_equal("u", {"a": "1", "b": "2"}, {"a": "1", "c": "2"})
