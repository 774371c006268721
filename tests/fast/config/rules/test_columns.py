"""The first line of a file of rows has the columns that flags name."""

import json

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.config.rules.model import LONGEST_LINE
from tests.fast.config.conftest import minimal

TEXT = json.dumps({"question": "1 + 1 =", "answer": {"text": "2"}}) + "\n"
UNREADABLE = ["\n\n", "[]\n", "{\n", '{"a": 1, "a": 2}\n', "\ud800\n", "{" + " " * LONGEST_LINE]


@pytest.fixture
def judged(tmp_path):
    """Judge a command with a file of these lines as the source of its prompts, or as ``{}`` in the flags."""

    def read(flags, without="", text=TEXT, source="--prompt-data {}"):
        file = tmp_path / "prompts.jsonl"
        file.write_text(text)
        return judge(read_command(minimal(f"{source} {flags}".format(file, file), f"--prompt-data {without}")))

    return read


@pytest.fixture
def refusals(judged):
    def read(*arguments, **named):
        with pytest.raises(FlagError) as caught:
            judged(*arguments, **named)
        return caught.value.messages

    return read


@pytest.mark.parametrize("source", ["--prompt-data {}", "--prompt-mix one {}"])
@pytest.mark.parametrize(
    ("flags", "fault", "hint"),
    [
        ("--label-key answer.text", "--input-key input", ""),
        ("--input-key question --label-key answr", "--label-key answr", "did you mean answer? "),
        ("--input-key question --label-key answer.txt", "--label-key answer.txt", "did you mean answer? "),
    ],
)
def test_a_column_that_is_not_there_is_refused(refusals, source, flags, fault, hint):
    (message,) = refusals(flags, source=source)
    assert message.startswith(f"{fault}: the first line of ")
    rest = f"prompts.jsonl has no such column; {hint}the columns are: question, answer; choose one with "
    assert message.endswith(rest + fault.split()[0])


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--eval-input-key inputx", "--eval-input-key inputx"),
        ("--eval-input-key question --eval-label-key answr", "--eval-label-key answr"),
        ("--eval-input-key question --label-key answr", "--label-key answr"),
        ("", "--input-key input"),
    ],
)
def test_sets_of_evaluation_have_their_columns(refusals, flags, fault):
    source = "--prompt-data reasoning_gym:products --eval-interval 2 --eval-prompt-data held_out {}"
    (message,) = refusals(flags, source=source)
    assert message.startswith(f"{fault}: the first line of ")
    assert message.endswith(f"choose one with --eval-{fault.split()[0].removeprefix('--').removeprefix('eval-')}")


def test_columns_that_are_there_are_accepted(judged):
    assert judged("--input-key question --label-key answer.text")
    evaluation = "--eval-interval 2 --eval-prompt-data held_out {}"
    assert judged(f"--input-key question --label-key answer.text {evaluation}")


def test_a_label_that_later_rows_may_have_is_accepted(judged):
    assert judged("--input-key question --label-key later --custom-rm-path my:reward", without="--rm-type")


def test_conversations_have_no_labels(refusals, judged):
    text = json.dumps({"input": [{"role": "user", "content": "1 + 1 ="}]})
    messages = refusals("--input-key messages --loss-type sft_loss", text=text)
    assert any(message.startswith("--input-key messages: the first line of ") for message in messages)
    given = "--loss-type sft_loss --debug-train-only --label-key answer --n-samples-per-prompt 1"
    assert judged(given, text=text, without="--rm-type --n-samples-per-prompt")


def test_a_wrong_reward_says_nothing_on_labels(refusals):
    (message,) = refusals("--rm-type math:x --input-key question --label-key answr")
    assert message.startswith("--rm-type")


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_first_line_that_cannot_be_read_is_left_to_loading(tmp_path, text):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert judge(read_command(minimal(f"--prompt-data {file} --label-key answer", "--prompt-data")))


def test_empty_lines_before_the_first_are_skipped_and_later_ones_not_read(refusals, judged):
    text = f"\n \n{TEXT}not JSON\n"
    label = "--label-key answer.text"
    assert judged(f"--input-key question {label}", text=text) and refusals(label, text=text)


def test_a_reward_without_labels_hides_no_missing_column(refusals):
    found = refusals("--rm-type math", without="--rm-type")
    assert [message.split(":")[0] for message in found] == ["--rm-type math", "--input-key input"]
