"""Sizes that divide the ranks, and one way of cutting sequences."""

import re

import pytest

DYNAMIC = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--context-parallel-size 3",
            "--context-parallel-size 3: must divide the 8 ranks that hold different tokens",
        ),
        ("--context-parallel-size 0", "at least 1"),
        ("--context-parallel-size 2 --qkv-format bshd", "--qkv-format bshd: padded lengths are not known"),
        (f"{DYNAMIC} --qkv-format bshd", "--qkv-format bshd: .* under --dynamic-context-parallel"),
        ("--max-seqlen-per-dp-cp-rank 64", "ignored without --dynamic-context-parallel"),
        ("--dynamic-context-parallel", "add --max-seqlen-per-dp-cp-rank"),
        ("--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 8", "64 tokens fit, .* is 64; give more than 8,"),
        (f"{DYNAMIC} --context-parallel-size 2", "--context-parallel-size 2: fixes what --dynamic-context-parallel"),
        (f"{DYNAMIC} --micro-batch-size 2", "--micro-batch-size 2: would be ignored by --dynamic-context-parallel"),
    ],
)
def test_refused_with_one_error(refused, flags, sentence):
    (message,) = refused(flags)
    assert re.search(sentence, message)


def test_dynamic_context_parallel_packs_by_its_own_budget(refused):
    messages = refused(f"{DYNAMIC} --use-dynamic-batch-size --max-tokens-per-gpu 64")
    assert [message.split(":")[0] for message in messages] == ["--use-dynamic-batch-size", "--max-tokens-per-gpu 64"]
    assert all("ignored by --dynamic-context-parallel" in message for message in messages)
