"""--deterministic-mode is refused where two runs may differ."""

import pytest

from miles.engine.sglang.launch import SglangProgram
from tests.fast.support.rows import rows


@pytest.mark.parametrize(("flags", "flag"), rows(__file__, "test_what_may_differ_is_refused"))
def test_what_may_differ_is_refused(refused, flags, flag):
    (message,) = refused(f"--deterministic-mode {flags}")
    assert message.startswith(flag)


def test_the_torch_engine_repeats_anywhere_and_servers_do_on_gpus(validated):
    assert validated("--deterministic-mode --async-steps 1").settings.training.deterministic_mode
    assert validated("--deterministic-mode --rollout-engine sglang --device cuda").settings.training.deterministic_mode


def test_servers_get_the_flag(tmp_path):
    def words(is_deterministic: bool) -> set[str]:
        spec = SglangProgram("model", "bfloat16", "cuda", 1, 0, is_deterministic=is_deterministic)
        return {*spec.arguments("127.0.0.1", 1)}

    assert words(True) - words(False) == {"--enable-deterministic-inference"}
