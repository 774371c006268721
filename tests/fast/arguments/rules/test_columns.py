"""The first line of a file of prompts has the columns that flags name."""

import json

import pytest

from miles.arguments.parser import judge, read_command
from miles.flags import FlagError
from tests.fast.arguments.conftest import minimal


@pytest.fixture
def judged(tmp_path):
    def read(flags, without="", text='{"question": "1 + 1 =", "answer": {"text": "2"}}\n', source="--prompt-data"):
        file = tmp_path / "prompts.jsonl"
        file.write_text(text)
        return judge(read_command(minimal(f"{source} {file} {flags}", f"--prompt-data {without}")))

    return read


@pytest.mark.parametrize("source", ["--prompt-data", "--prompt-mix one"])
@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--label-key answer.text", "--input-key input: the first line of "),
        ("--input-key question --label-key answr", "--label-key answr: the first line of "),
        ("--input-key question --label-key answr.text", "--label-key answr.text: the first line of "),
    ],
)
def test_a_column_that_is_not_there_is_refused(judged, source, flags, fault):
    with pytest.raises(FlagError) as caught:
        judged(flags, source=source)
    (message,) = caught.value.messages
    assert message.startswith(fault) and message.endswith(
        "prompts.jsonl has no such column; its columns are: question, answer"
    )


def test_columns_that_are_there_are_accepted(judged):
    assert judged("--input-key question --label-key answer.text")


def test_a_label_that_later_rows_may_have_is_accepted(judged):
    assert judged("--input-key question --label-key later --custom-rm-path my:reward", without="--rm-type")


def test_conversations_have_no_labels(judged):
    text = json.dumps({"input": [{"role": "user", "content": "1 + 1 ="}]})
    with pytest.raises(FlagError) as caught:
        judged("--input-key messages --loss-type sft_loss", text=text)
    assert any(message.startswith("--input-key messages: the first line of ") for message in caught.value.messages)


@pytest.mark.parametrize("text", ["", "[]\n", "{\n"])
def test_a_first_line_that_cannot_be_read_is_left_to_loading(judged, text):
    assert judged("--label-key answer", text=text)
