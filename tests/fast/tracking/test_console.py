"""The console prints one line per step, only measured values, and no control codes into a file."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from miles.tracking.console import ConsoleSink, step_line
from miles.tracking.run_header import RunHeader

HEADER = RunHeader("a run", {}, "the mean of means", "1/N", total_steps=3)


def printed(console_is_terminal: bool) -> str:
    file = io.StringIO()
    sink = ConsoleSink(HEADER, "out", Console(file=file, force_terminal=console_is_terminal, width=60))
    for step in range(1, 4):
        sink.log(step, {"rollout/reward": 0.5, **{f"time/phase_{i}": 1.0 for i in range(20)}})
    sink.close()
    return file.getvalue()


def test_plain_and_unwrapped_without_a_terminal() -> None:
    lines = printed(console_is_terminal=False).splitlines()
    assert "\x1b" not in "".join(lines)
    assert len([line for line in lines if line.startswith("step ")]) == 3
    assert all("phase_19" in line for line in lines if line.startswith("step "))


def test_a_terminal_gets_a_bar_that_reaches_its_end() -> None:
    assert "3/3" in printed(console_is_terminal=True)


def test_the_line_names_what_was_measured() -> None:
    values = {
        "rollout/reward": 0.25,
        "eval/unseen/accuracy": 0.75,
        "train/grad_norm": 1.5,
        "time/step": 2.0,
        "time/train": 1.5,
    }
    assert step_line(3, values).plain == "step    3 | reward 0.250  held-out 0.750  grad 1.500 | step 2.0s  train 1.5s"


def test_several_evaluation_sets_are_distinguished() -> None:
    line = step_line(0, {"eval/easy/accuracy": 1.0, "eval/hard/accuracy": 0.0}).plain
    assert "held-out easy 1.000" in line and "held-out hard 0.000" in line


@given(
    st.dictionaries(st.sampled_from(["rollout/reward", "train/pg_loss", "time/step", "eval/[x]/accuracy"]), st.floats())
)
def test_any_value_can_be_shown(values: dict[str, float]) -> None:
    assert "\n" not in step_line(0, values).plain
