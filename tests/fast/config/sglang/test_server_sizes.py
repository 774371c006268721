"""Sizes that divide an engine of SGLang must divide its devices, as SGLang checks when a server starts."""

import pytest

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine "
ATTENTION = "--sglang-enable-dp-attention "


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("8 " + ATTENTION + "--sglang-dp-size 3", "--sglang-dp-size 3: does not divide the 8 devices of an engine"),
        (
            "1 --num-gpus-per-node 1 " + ATTENTION + "--sglang-dp-size 2",
            "--sglang-dp-size 2: does not divide the 1 device of an engine (--rollout-num-gpus-per-engine); give a "
            "divisor of 1, or --rollout-num-gpus-per-engine 2 or a multiple",
        ),
        ("8 " + ATTENTION + "--sglang-data-parallel-size 0", "--sglang-data-parallel-size 0: must be a whole number"),
        ("4 --sglang-attn-dp-size 8", "--sglang-attn-dp-size 8: does not divide the 4 devices"),
        (
            "8 " + ATTENTION + "--sglang-dp-size 2 --sglang-attn-dp-size 2",
            "--sglang-dp-size 2: contradicts --sglang-attn-dp-size 2, which states the same as this with "
            "--sglang-enable-dp-attention; drop --sglang-dp-size",
        ),
        ("4 --sglang-ep-size 8", "--sglang-ep-size 8: does not divide the 4 devices"),
        ("4 --sglang-ep 3", "--sglang-ep 3: does not divide the 4 devices"),
        (
            "4 --sglang-expert-parallel-size=-1",
            "--sglang-expert-parallel-size -1: must be a whole number of at least 1",
        ),
        ("4 --sglang-attn-cp-size 3", "--sglang-attn-cp-size 3: does not divide the 4 devices"),
        (
            "4 --sglang-attn-dp-size 4 --sglang-attn-cp-size 2",
            "--sglang-attn-cp-size 2: with --sglang-attn-dp-size 4 makes 8 groups, which do not divide the 4 devices",
        ),
        ("4 --sglang-moe-dp-size 2", "--sglang-moe-dp-size 2: must be 1 or equal to --sglang-attn-cp-size, which is 1"),
        (
            "8 --sglang-moe-dp-size 2 --sglang-attn-cp-size 2 --sglang-ep-size 2",
            "--sglang-moe-dp-size 2: times --sglang-ep-size 2 is not 8",
        ),
        ("4 --sglang-moe-dense-tp-size 2", "--sglang-moe-dense-tp-size 2: SGLang divides dense layers over the 4"),
        ("4 --sglang-dwdp-size 2", "--sglang-dwdp-size 2: SGLang distributes weights over the 4 devices"),
        ("4 --sglang-dp-size two", "--sglang-dp-size two: SGLang reads a whole number"),
        ("4 --sglang-pp-size two", "--sglang-pp-size two: SGLang reads a whole number"),
    ],
)
def test_size_that_does_not_fit_is_refused(refused, flags, expected):
    (message,) = refused(SGLANG + flags)
    assert expected in message


@pytest.mark.parametrize(
    "flags",
    [
        "8 --sglang-ep-size 4 --sglang-enable-dp-attention --sglang-dp-size 2 --sglang-moe-dense-tp-size 1",
        "8 --sglang-attn-dp-size 2 --sglang-attn-cp-size 4 --sglang-moe-dense-tp-size 8",
        "8 --sglang-attn-cp-size 2 --sglang-moe-dp-size 2 --sglang-ep-size 4",
        "8 --sglang-ep-size 16 --sglang-moe-a2a-backend deepep",  # which divides the experts over all devices
    ],
)
def test_size_that_fits_is_accepted(validated, flags):
    validated(SGLANG + flags)


def test_engines_that_run_already_have_sizes_of_their_own(refused):
    flags = "1 --rollout-external --rollout-external-engine-addrs h:1 --sglang-ep-size 8"
    (message,) = refused(SGLANG + flags)
    assert "whose engines are already running" in message
