"""Responses of the real SGLang server, and weight updates to it."""

import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR

from miles.engine.weight_sync.sender import check_equal
from miles.types.weights import in_chunks
from tests.fast.conftest import byte_tokenizer
from tests.fast.engine.sglang_servers import log_probs_of

# The first test of the suite that needs the server starts it.
pytestmark = pytest.mark.timeout(900)

PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37))]


def assert_log_probs(generation, expected):
    assert torch.tensor(generation.log_probs).double() == pytest.approx(expected, abs=SERVER_LOG_PROB_ERROR)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 20, 0.9)])
def test_log_probs_are_the_models(running, engine, temperature, top_k, top_p):
    """They are relative to the whole vocabulary, whatever top-k and top-p cut off."""
    sampling = {"max_new_tokens": 12, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    generations = running.generate(engine, PROMPTS, seeds=4, **sampling)
    for prompt, generation in zip([p for p in PROMPTS for _ in range(4)], generations, strict=True):
        assert_log_probs(generation, log_probs_of(running.model, prompt, generation.token_ids, temperature))


def test_log_probs_are_over_the_support_that_the_server_returns(running, engine):
    sampling = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    generations = running.generate(engine, PROMPTS, seeds=4, **sampling, returns_support=True)
    for prompt, generation in zip([p for p in PROMPTS for _ in range(4)], generations, strict=True):
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        logits = running.model(ids).logits[0, len(prompt) - 1 : -1].double() / 0.7
        expected = []
        for row, token_set, token in zip(logits, generation.support.sets(), generation.token_ids, strict=True):
            assert 1 <= len(token_set) <= 20
            expected.append(row[token_set].log_softmax(-1)[token_set.tolist().index(token)])
        assert_log_probs(generation, torch.stack(expected))


def test_greedy_repeats_and_follows_the_model(running, engine):
    first, again = (running.generate(engine, PROMPTS, max_new_tokens=8, temperature=0.0) for _ in range(2))
    assert [g.token_ids for g in first] == [g.token_ids for g in again]
    for prompt, generation in zip(PROMPTS, first, strict=True):
        assert_log_probs(generation, log_probs_of(running.model, prompt, generation.token_ids))


def test_stop_token_ends_a_response_and_stays_in_it(running, engine):
    free = running.generate(engine, PROMPTS[:1], max_new_tokens=8, temperature=0.0)[0]
    stop = free.token_ids[3]
    ended = running.generate(engine, PROMPTS[:1], max_new_tokens=8, temperature=0.0, stop_token_ids=(stop,))[0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (free.finish_reason, ended.finish_reason) == ("length", "stop")


def test_a_text_ends_a_response_where_it_is_complete_and_stays_in_it(running, engine):
    free = running.generate(engine, [PROMPTS[0]], max_new_tokens=24, temperature=0.0)[0]
    stop = byte_tokenizer().decode(free.token_ids[3:7])  # four tokens, which a tokenizer with merges may write as one
    assert byte_tokenizer().decode(free.token_ids[:6]).count(stop) == 0
    ended = running.generate(engine, [PROMPTS[0]], max_new_tokens=24, temperature=0.0, stop_texts=("*", stop))[0]
    assert ended.token_ids == free.token_ids[:7] and len(ended.log_probs) == 7
    assert (free.finish_reason, ended.finish_reason) == ("length", "stop")


@pytest.mark.parametrize("prompt", [(), (300_000,), (-1,)])
def test_wrong_prompt_is_refused_before_a_server_sees_it(running, engine, prompt):
    with pytest.raises(ValueError, match="prompt"):
        running.generate(engine, [prompt], max_new_tokens=1)
    assert running.generate(engine, PROMPTS[:1], max_new_tokens=1)


def test_a_request_that_a_server_refuses_stops_with_its_reason(running, engine):
    with pytest.raises(ValueError, match="/generate: HTTP 400"):
        running.generate(engine, [tuple([5] * 500)], max_new_tokens=1)  # longer than the model's context


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("mode", ["disk", "broadcast", "ipc"])
def test_all_weights_arrive(running, mode, check):
    """Send other weights, then the first again; responses and log-probs come from the weights sent."""
    with running.engine(update_weight_transfer_mode=mode, check_weight_update_equal=check) as engine:
        for model in (running.other, running.model):
            version = running.update(engine, model)
            for prompt, generation in zip(PROMPTS, running.generate(engine, PROMPTS, max_new_tokens=6), strict=True):
                assert_log_probs(generation, log_probs_of(model, prompt, generation.token_ids))
                assert generation.token_versions == [version] * len(generation.token_ids)


def test_a_tensor_that_is_not_sent_is_found(running):
    missing = "model.layers.1.mlp.down_proj.weight"
    incomplete = list(in_chunks((n, p) for n, p in running.model.named_parameters() if n != missing))
    with running.engine(check_weight_update_equal=True) as engine:
        with pytest.raises(ValueError, match=f"--check-weight-update-equal: 1 of .*{missing}"):
            running.run(engine.update_weights(incomplete, next(running.versions)))
        running.run(engine.servers.call_all(lambda client: client.resume()))  # for the next engine


def test_a_refused_broadcast_is_an_error_and_does_not_hang(running):
    wrong = list(in_chunks((name, torch.zeros(3, 3)) for name, _ in running.model.named_parameters()))
    with running.engine() as engine:
        with pytest.raises(RuntimeError, match="did not take the weights: .*/update_weights_from_distributed"):
            running.run(engine.update_weights(wrong, next(running.versions)))
        running.run(engine.servers.call_all(lambda client: client.resume()))  # for the next engine


def test_memory_that_was_released_comes_back_with_the_weights(running):
    """On CPU a server answers but keeps its memory, so this only checks the calls and their order."""
    with running.engine() as engine:
        running.run(engine.release_memory())
        running.update(engine, running.other)
        for prompt, generation in zip(PROMPTS, running.generate(engine, PROMPTS, max_new_tokens=6), strict=True):
            assert_log_probs(generation, log_probs_of(running.other, prompt, generation.token_ids))


def test_checksums_that_differ_are_named():
    check_equal("u", {"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    with pytest.raises(ValueError, match=r"2 of 2 tensors of the engine at u .*\(b, c\)"):
        check_equal("u", {"a": "1", "b": "2"}, {"a": "1", "c": "2"})
