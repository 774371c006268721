"""Rules of ``--num-rollout-workers``."""

import pytest

from miles.base.flags import FlagError
from miles.config.explain import explain
from tests.fast.support.rows import rows

SGLANG = "--rollout-engine sglang --rollout-external --rollout-external-engine-addrs 127.0.0.1:30000"


@pytest.mark.parametrize(("flags", "message"), rows(__file__, "test_what_no_workers_can_do_is_refused"))
def test_what_no_workers_can_do_is_refused(validated, flags, message):
    with pytest.raises(FlagError) as refused:
        validated(flags)
    assert message in refused.value.args[0]


def test_workers_have_shares_of_two_engines(validated):
    two = SGLANG + " 127.0.0.1:30001 --sglang-server-concurrency 2"
    assert "2 external SGLang engines fed by 4 processes" in explain(validated(f"{two} --num-rollout-workers 4"))
    assert "fed by" not in explain(validated(two))
