"""Rules of ``--num-rollout-workers``."""

import pytest

from miles.base.flags import FlagError
from miles.config.explain import explain

SGLANG = "--rollout-engine sglang --rollout-external --rollout-external-engine-addrs 127.0.0.1:30000"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-rollout-workers 0", "--num-rollout-workers 0: must be in [1, 1000]; give a number from 1 to 1000"),
        (
            "--num-rollout-workers 4",
            "--num-rollout-workers 4: the torch engine runs inside the rollout process, so no other process can reach "
            "it; use --rollout-engine sglang or vllm, or give 1",
        ),
        (
            f"{SGLANG} --num-rollout-workers 4 --sglang-server-concurrency 3",
            "--num-rollout-workers 4: leaves some of them without a request: all servers together take 3 at once; "
            "give at most 3, or a larger --sglang-server-concurrency",
        ),
        (
            f"{SGLANG} --num-rollout-workers 4 --agent-command python --agent-concurrency 3 --apply-chat-template "
            "--rollout-max-context-len 128",
            "--num-rollout-workers 4: leaves some of them without a program: --agent-concurrency 3 is for all; give "
            "--agent-concurrency 4 or more, or fewer workers",
        ),
    ],
)
def test_what_no_workers_can_do_is_refused(validated, flags, message):
    with pytest.raises(FlagError) as refused:
        validated(flags)
    assert message in refused.value.args[0]


def test_workers_have_shares_of_two_engines(validated):
    two = SGLANG + " 127.0.0.1:30001 --sglang-server-concurrency 2"
    assert "2 external SGLang engines fed by 4 processes" in explain(validated(f"{two} --num-rollout-workers 4"))
    assert "fed by" not in explain(validated(two))
