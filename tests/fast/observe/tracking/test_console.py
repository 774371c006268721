"""The console prints one line per step that fits 80 columns, the time left, and no control codes into a file."""

from __future__ import annotations

import io
import os
import threading
from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from miles.observe.console import (
    WIDTH,
    ConsoleSink,
    JsonSink,
    Loading,
    LongPhases,
    PhaseProgress,
    TimeLeft,
    held_out_lines,
    in_words,
    step_line,
)
from miles.observe.run_files import RunHeader, SampleRecord

HEADER = RunHeader("a run", {}, "the mean of means", "1/N", total_steps=3)
NAMES = ["rollout/reward", "rollout/response_length", "train/pg_loss", "train/grad_norm", "train/entropy_loss"]
NAMES += [
    "train/kl_loss",
    "train/ppo_kl",
    "train/value_loss",
    "perf/tokens_per_second",
    "time/step",
    "eval/[x]/accuracy",
]


def printed(console_is_terminal: bool) -> str:
    file = io.StringIO()
    sink = ConsoleSink(HEADER, "out", Console(file=file, force_terminal=console_is_terminal, width=60))
    for step in range(1, 4):
        sink.phase("train")
        sink.log(step, dict.fromkeys(NAMES, 40.0))
    sink.close()
    return file.getvalue()


def test_plain_and_unwrapped_without_a_terminal() -> None:
    lines = printed(console_is_terminal=False).splitlines()
    assert "\x1b" not in "".join(lines)
    assert len([line for line in lines if line.startswith("step ")]) == 3


def test_a_line_that_nobody_reads_is_an_error_for_the_run_to_explain(monkeypatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.FileIO(writing, "wb"), write_through=True))
    with pytest.raises(BrokenPipeError):
        ConsoleSink(HEADER, "out")


def test_a_terminal_gets_a_bar_with_the_phase_and_the_time_left_that_reaches_its_end() -> None:
    text = printed(console_is_terminal=True)
    assert "3/3" in text and "left 0 s" in text and "train" in text


def test_a_terminal_shows_how_far_a_phase_is() -> None:
    file = io.StringIO()
    sink = ConsoleSink(HEADER, "out", Console(file=file, force_terminal=True, width=80))
    asked = threading.Event()
    answers = iter(["37 of 64 groups", None])

    def groups() -> str | None:
        answer = next(answers, None)
        if answer is None:
            asked.set()  # the answer before it is shown
        return answer

    sink.watch({"generate": groups})
    sink.phase("generate")
    assert asked.wait(60)
    sink.phase("train")
    sink.close()
    assert "generate  37 of 64 groups" in file.getvalue()


def test_elsewhere_nothing_is_asked() -> None:
    def never() -> str | None:
        raise AssertionError

    file = io.StringIO()
    sink = ConsoleSink(HEADER, "out", Console(file=file, force_terminal=False, width=80))
    sink.watch({"generate": never})
    sink.phase("generate")
    sink.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "phase-progress"]
    JsonSink.watch(object.__new__(JsonSink), {"generate": never})


def test_an_answer_that_comes_after_its_phase_is_not_shown() -> None:
    lines: list[str] = []
    noted: list[str] = []
    asked, answer = threading.Event(), threading.Event()

    def slow() -> str:
        asked.set()
        assert answer.wait(60)
        return "1 of 2 groups"

    progress = PhaseProgress({"generate": slow}, lines.append, noted.append, seconds=0.01)
    progress.enter("generate")
    assert asked.wait(60)
    progress.enter("train")
    answer.set()
    progress.close()
    assert lines == noted == []


def test_a_question_that_fails_is_noted_once_and_asked_again() -> None:
    lines: list[str] = []
    noted: list[str] = []
    done = threading.Event()
    faults: list[Exception] = [FileNotFoundError("iter_1 is\ngone"), RuntimeError("again")]

    def fails_twice() -> str | None:
        if faults:
            raise faults.pop(0)
        if lines:
            done.set()
        return "0.10 GB"

    progress = PhaseProgress({"save": fails_twice}, lines.append, noted.append, seconds=0.01)
    progress.enter("save")
    assert done.wait(60)
    progress.close()
    assert noted == ["note: how far save is cannot be shown (FileNotFoundError: iter_1 is gone)"]
    assert set(lines) == {"save  0.10 GB"}


@pytest.mark.parametrize(("is_terminal", "log_format"), [(True, "text"), (True, "json"), (False, "text")])
def test_loading_is_shown_on_a_terminal_only(is_terminal: bool, log_format: str) -> None:
    file = io.StringIO()
    with closing(Loading(log_format, Console(file=file, force_terminal=is_terminal, width=80))) as loading:
        loading.show("the trainer's models")
        loading.close()
    assert ("loading" in file.getvalue()) == (is_terminal and log_format == "text")


POLICY_STEP = {
    "rollout/reward": 0.5625,
    "eval/unseen/reward": 0.41,
    "train/loss": -0.00001,
    "train/pg_loss": 0.0,
    "train/grad_norm": 2.14,
    "train/kl_loss": 0.0021,
    "rollout/response_length": 9.2,
    "time/step": 0.2,
    "time/train": 0.1,
}


def test_the_line_says_what_tells_that_it_learns() -> None:
    line = step_line(12, POLICY_STEP, total=80, left=14.0, first={"unseen": 0.36}).plain
    assert line == "step 12/80  reward 0.56  held-out 0.41 (+0.05)  grad 2.1  0.2 s  left 14 s"
    without = {name: value for name, value in POLICY_STEP.items() if not name.startswith("eval/")}
    line = step_line(12, without, total=80, left=14.0).plain
    assert line == "step 12/80  reward 0.56  grad 2.1  kl 0.002  length 9  0.2 s  left 14 s"
    assert step_line(1, {"train/loss": 2.3456, "train/grad_norm": 12.0}).plain == "step    1  loss 2.346  grad 12"
    critic = {"train/loss": 0.5, "train/value_loss": 0.25, "train/pg_loss": 0.25}
    assert step_line(1, critic).plain == "step    1  value 0.25"


def test_what_does_not_fit_is_left_out_in_one_order() -> None:
    names = ["reward", "held-out", "grad", "kl", "length"]
    order = list[str]()
    for width in range(WIDTH, 20, -1):
        with patch("miles.observe.console.WIDTH", width):
            line = step_line(12, POLICY_STEP, total=80, left=14.0, first={"unseen": 0.36}).plain
        order += [name for name in reversed(names) if f" {name} " not in line and name not in order]
    assert order == ["length", "kl", "grad", "held-out", "reward"]


def test_a_held_out_value_is_compared_with_the_first_of_the_run() -> None:
    file = io.StringIO()
    sink = ConsoleSink(HEADER, "out", Console(file=file, force_terminal=False, width=80))
    for step, value in ((0, 0.25), (1, 0.5), (2, 0.2)):
        sink.log(step, {"eval/x/reward": value})
    sink.close()
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step")]
    assert [line.partition("held-out ")[2] for line in lines] == ["0.25", "0.50 (+0.25)", "0.20 (-0.05)"]


def test_several_evaluation_sets_have_lines_of_their_own() -> None:
    values = {f"eval/set_{number}/reward": number / 10 for number in range(10)}
    assert step_line(0, values).plain == "step    0"
    lines = held_out_lines(values)
    assert all(len(line) <= WIDTH for line in lines)
    assert all(f"set_{number} 0.{number}0" in "".join(lines) for number in range(10))


@given(st.dictionaries(st.sampled_from(NAMES), st.floats()), st.integers(0, 10**6), st.floats(0, 1e12))
def test_a_line_fits_80_columns_whatever_was_measured(values: dict[str, float], step: int, left: float) -> None:
    line = step_line(step, values, total=10**6, left=left).plain
    assert "\n" not in line and len(line) <= WIDTH
    assert ("rollout/reward" in values) == ("reward " in line), "the reward is never left out"
    assert f"left {in_words(left)}" in line


@pytest.mark.parametrize("seconds", [0.4, 3.0, 40.0, 5000.0])  # Rich forgets steps above 30 s
def test_the_time_left_is_known_after_two_steps_whatever_they_take(seconds: float) -> None:
    left = TimeLeft(total_steps=100)
    assert left.log(0, {"eval/x/accuracy": 0.1, "time/step": 900.0}) is None, "step 0 is an evaluation"
    row = {"train/loss": 0.0, "time/step": seconds}
    assert left.log(1, row) is None
    assert [left.log(step, row) for step in (2, 3, 4)] == [98 * seconds, 97 * seconds, 96 * seconds]


def test_a_slow_first_iteration_is_forgotten_and_steps_of_an_iteration_share_its_time() -> None:
    left = TimeLeft(total_steps=40)
    told = []
    for iteration in range(3):
        for step in range(iteration * 4 + 1, iteration * 4 + 5):
            timed = {"time/step": 100.0 if iteration == 0 else 8.0} if step % 4 == 0 else {}
            told.append(left.log(step, {"train/loss": 0.0, **timed}))
    assert told[:3] == [None] * 3 and told[3] == 36 * 25.0
    assert told[-1] == 28 * 2.0


def test_a_step_without_anything_to_learn_is_explained_once() -> None:
    file = io.StringIO()
    sink = ConsoleSink(HEADER, "out", Console(file=file))
    alike, mixed = {"rollout/zero_std_groups": 1.0}, {"rollout/zero_std_groups": 0.5}
    for step, values in enumerate((mixed | {"train/grad_norm": 0.0}, alike | {"train/grad_norm": 0.1}), start=1):
        sink.log(step, values)
    assert "nothing to learn" not in file.getvalue()
    for step in (3, 4):
        sink.log(step, alike | {"train/grad_norm": 0.0})
    assert file.getvalue().count("all answers to each prompt had one reward, so this step had nothing to learn") == 1


@pytest.mark.parametrize(("held_out", "words"), [(0.0, "at temperature 0, which is greedy"), (1.0, "at temperature 1")])
def test_the_start_tells_how_held_out_prompts_are_answered(held_out: float, words: str) -> None:
    evaluation = {"eval_prompt_data": ("x", "x.jsonl"), "eval_temperature": held_out}
    header = replace(HEADER, settings={"rollout": {"rollout_temperature": 1.0}, "evaluation": evaluation})
    file = io.StringIO()
    ConsoleSink(header, "out", Console(file=file)).close()
    assert f"training answers at temperature 1, held-out ones {words}\n" in file.getvalue()


def test_a_resumed_run_compares_with_the_first_evaluation_of_the_whole_run() -> None:
    file = io.StringIO()
    sink = ConsoleSink(replace(HEADER, total_steps=25), "out", Console(file=file, width=80))
    sink.resume(13, [{"step": 0, "eval/a/reward": 0.15}, {"step": 10, "eval/a/reward": 0.3, "train/grad_norm": 1.0}])
    sink.log(20, {"eval/a/reward": 0.36, "train/grad_norm": 1.0})
    assert "continues at step 13 of 25\n" in file.getvalue() and "held-out 0.36 (+0.21)" in file.getvalue()


def test_an_answer_is_printed_first_and_after_each_tenth_of_the_run() -> None:
    file = io.StringIO()
    sink = ConsoleSink(replace(HEADER, total_steps=40), "out", Console(file=file, width=80))
    for step in range(1, 41):
        sink.log_samples(step, [SampleRecord("p", "x\n" * 99 + str(step), 0.5, "12", "completed")])
    answers = [line for line in file.getvalue().splitlines() if line.startswith('  answer "…')]
    assert [line.split()[-5] for line in answers] == [f'{step}"' for step in range(1, 41, 4)]
    assert all(len(line) == WIDTH and line.endswith('"  label 12  reward 0.50') for line in answers)


def test_a_run_that_only_generates_prints_an_answer_to_each_of_the_first_prompts() -> None:
    file = io.StringIO()
    header = replace(HEADER, settings={"rollout": {"debug_rollout_only": True}})
    sink = ConsoleSink(header, "out", Console(file=file, width=80))
    sink.log_samples(1, [SampleRecord("p", f"{n}", 0.0, None, "completed", group=n // 4) for n in range(40)])
    assert file.getvalue().splitlines()[-8:] == [f'  answer "{n}"  reward 0.00' for n in range(0, 32, 4)]


def test_a_long_phase_is_said_again_until_it_ends() -> None:
    said: list[str] = []
    twice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()

    phases = LongPhases(say, seconds=0.01)
    phases.enter("generate")
    assert twice.wait(60)
    phases.close()
    assert all(text.startswith("  generate: ") and text.endswith(" so far") for text in said)
