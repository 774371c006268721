"""How the client parses a server's answer."""

import base64

import numpy as np
import pytest

from miles.engine.sglang.client import EngineUnavailable, RequestRefused, read_experts, read_generation


def answer(tokens, *spans, version="7"):
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": version,
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
    }
    return {"output_ids": tokens, "meta_info": meta}


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([], [7, 7, 7, 7]),
        ([("7", 0, 4)], [7, 7, 7, 7]),
        ([("5", 0, 1), ("6", 1, 3), ("7", 3, 4)], [5, 6, 6, 7]),
        ([("default", 0, 3), ("7", 3, 4)], [-1, -1, -1, 7]),
    ],
)
def test_each_token_has_the_version_of_its_span(spans, versions):
    assert read_generation(answer([1, 2, 3, 4], *spans), vocab=9).token_versions == versions


@pytest.mark.parametrize("spans", [[("5", 0, 9), ("7", 9, 10)], [("5", 0, "x"), ("7", 1, 2)]])
def test_spans_that_do_not_match_the_response_are_refused(spans):
    with pytest.raises(EngineUnavailable, match="no generation"):
        read_generation(answer([1, 2], *spans), vocab=9)


def with_support(tokens, sets, log_probs):
    made = answer(tokens)
    made["meta_info"] |= {"output_token_sampling_mask": sets, "output_token_sampling_logprobs": log_probs}
    return made


def test_log_probs_are_over_the_support_if_it_was_asked_for():
    made = with_support([1, 2], [[3, 1], [2]], [-0.5, 0.0])
    found = read_generation(made, vocab=9, with_support=True)
    assert [one.tolist() for one in found.support.sets()] == [[1, 3], [2]] and found.log_probs == [-0.5, 0.0]
    plain = read_generation(made, vocab=9)
    assert plain.support is None and plain.log_probs == [-1.0, -1.0]
    aborted = answer([])
    aborted["meta_info"]["finish_reason"]["type"] = "abort"
    assert len(read_generation(aborted, vocab=9, with_support=True).support) == 0


@pytest.mark.parametrize(
    "made",
    [
        with_support([1, 2], [[1]], [-0.5, 0.0]),
        with_support([1, 2], [[1], [3]], [-0.5, 0.0]),
        with_support([1, 2], [[1], [2, 9]], [-0.5, 0.0]),
        with_support([1, 2], [[1], [2]], [-0.5]),
        with_support([1, 2], [[1], [2]], [-0.5, float("nan")]),
        with_support([1, 2], [[1], [2, -1]], [-0.5, -0.5]),
        with_support([1, 2], [[1], []], [-0.5, -0.5]),
    ],
)
def test_supports_that_do_not_fit_the_tokens_are_refused(made):
    with pytest.raises(EngineUnavailable, match="kept tokens"):
        read_generation(made, vocab=9, with_support=True)


def test_a_server_that_knows_no_supports_is_named():
    with pytest.raises(RequestRefused, match="SGLang 0.5.23 .* or add --no-support-replay"):
        read_generation(answer([1, 2]), vocab=9, with_support=True)


def test_experts_are_read_in_the_smallest_dtype():
    for largest, dtype in ((255, np.uint8), (300, np.int16)):
        wanted = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2)
        wanted[1, 2, 1] = largest
        packed = base64.b64encode(wanted.tobytes()).decode()
        found = read_experts({"routed_experts": packed}, (2, 3, 2))
        assert found.dtype == dtype and np.array_equal(found, wanted)


@pytest.mark.parametrize("given", ["", "AAAA", "?", 3, base64.b64encode(np.full(12, -1, np.int32).tobytes()).decode()])
def test_experts_of_another_shape_are_refused(given):
    with pytest.raises(EngineUnavailable, match="experts"):
        read_experts({"routed_experts": given}, (2, 3, 2))
    with pytest.raises(RequestRefused, match="start it with --enable-return-routed-experts"):
        read_experts({}, (2, 3, 2))
