"""What is read out of a server's answer, and how many sockets a process may open for it."""

import resource
from contextlib import contextmanager

import psutil
import pytest

from miles.engine.sglang.open_files import SPARE, allow_open_files
from miles.engine.sglang.router import Router
from miles.engine.sglang.sglang_client import EngineUnavailable, read_generation


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
def test_spans_that_are_not_of_the_response_are_no_answer(spans):
    with pytest.raises(EngineUnavailable, match="no generation"):
        read_generation(answer([1, 2], *spans), vocab=9)


@contextmanager
def lowest_soft_limit(room):
    """Of open files, while the body runs; the hard limit, which must leave ``room`` beside what is spared."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, hard = before
    if hard == resource.RLIM_INFINITY or hard < SPARE + room:
        pytest.skip(f"the hard limit of this system is {hard}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SPARE, hard))
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_and_the_hard_one_told():
    with lowest_soft_limit(room=600) as hard:
        allow_open_files(500, "--flag 500")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (SPARE + 500, hard)
        with pytest.raises(ValueError, match=f"--flag 9 needs {hard + SPARE} open files .* allows {hard}"):
            allow_open_files(hard, "--flag 9")


def test_the_router_may_open_two_sockets_a_request(tmp_path):
    """A process takes over the limit of the one that starts it, and the shell's is 1024 as a rule."""
    with lowest_soft_limit(room=1200) as hard:
        with pytest.raises(ValueError, match=f"--sglang-server-concurrency for {hard} requests .* allows {hard}"):
            Router((), "127.0.0.1", tmp_path / "router.log", requests=hard)
        router = Router((), "127.0.0.1", tmp_path / "router.log", requests=600)
        limit = psutil.Process(router._process.pid).rlimit(psutil.RLIMIT_NOFILE)
        router.close()
        assert limit == (SPARE + 1200, hard)
