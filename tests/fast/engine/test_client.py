"""How the client parses a server's answer."""

import pytest

from miles.engine.sglang.client import EngineUnavailable, read_generation


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
