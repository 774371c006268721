"""Sizes that divide an engine of SGLang must divide its devices, as SGLang checks when a server starts."""

import pytest

from tests.fast.support.rows import rows

SGLANG = "--rollout-engine sglang --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine "
ATTENTION = "--sglang-enable-dp-attention "


@pytest.mark.parametrize(("flags", "expected"), rows(__file__, "test_size_that_does_not_fit_is_refused"))
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
