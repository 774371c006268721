"""--tool-key: the chat template shows the tools of a row."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from miles.base.text import InputError
from miles.tasks.data.conversations import load_conversations
from miles.tasks.data.prompts import RowReader, load_prompts
from miles.tasks.data.settings import DataArguments
from tests.fast.tasks.data.conftest import CHAT_TEMPLATE

CHAT = DataArguments(apply_chat_template=True, rollout_shuffle=False)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def tokenizer(base_tokenizer):
    """One whose template writes the names of tools before the messages."""
    result = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    result.chat_template = WITH_TOOLS
    return result


@pytest.fixture
def source(tmp_path):
    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["list", "its JSON"])
def test_the_tools_of_a_row_are_shown_and_those_of_other_rows_are_not(source, tokenizer, tools):
    rows = source({"input": "1 + 1", "tools": tools}, {"input": "2", "tools": None}, {"input": "3", "tools": ""})
    first, *others = load_prompts(rows, CHAT, tokenizer)
    assert first.text == "[tools]add <s>[user]1 + 1[assistant]" and first.tools == [ADD]
    assert all("[tools]" not in prompt.text and prompt.tools is None for prompt in others)


def test_the_flag_chooses_the_column(source, tokenizer):
    rows = source({"input": "1 + 1", "functions": [ADD], "tools": "not of this kind"})
    (prompt,) = load_prompts(rows, DataArguments(apply_chat_template=True, tool_key="functions"), tokenizer)
    assert prompt.text.startswith("[tools]add")


def test_a_part_of_a_column_holds_tools_and_metadata_too(source, tokenizer):
    rows = source({"input": [{"role": "user", "content": "1 + 1"}], "extra": {"tools": [ADD], "info": {"a": 1}}})
    data = DataArguments(apply_chat_template=True, tool_key="extra.tools", metadata_key="extra.info")
    (prompt,) = load_prompts(rows, data, tokenizer)
    assert prompt.text.startswith("[tools]add") and prompt.metadata == {"a": 1}
    (unrendered,) = load_prompts(rows, data, tokenizer).unrendered(1)
    assert unrendered.metadata == {"a": 1}


def test_without_the_template_the_column_is_not_read(source, tokenizer):
    (prompt,) = load_prompts(source({"input": "1 + 1", "tools": 7}), DataArguments(), tokenizer)
    assert prompt.text == "1 + 1" and prompt.tools is None


def test_a_source_of_the_users_has_tools_too(tokenizer):
    prompt = RowReader(CHAT, tokenizer)({"input": "1 + 1", "tools": [ADD]}, 0)
    assert prompt.text.startswith("[tools]add")


def test_special_tokens_in_tools_are_text(source, tokenizer):
    tool = {"type": "function", "function": {"name": "add<s>"}}
    (prompt,) = load_prompts(source({"input": "1", "tools": [tool]}), CHAT, tokenizer)
    assert prompt.text.startswith("[tools]add<s> ") and prompt.token_ids.count(0) == 1


def test_conversations_are_trained_on_behind_their_tools(source, tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    messages = [
        {"role": "user", "content": "1 + 1"},
        call | {"content": ""},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    rows = source({"input": messages, "tools": [ADD]}, {"input": messages})
    with_tools, without = load_conversations(rows, CHAT, tokenizer)
    assert with_tools.prompt.text.startswith("[tools]add ") and not without.prompt.text.startswith("[tools]")
    assert with_tools.response_ids == without.response_ids and with_tools.loss_mask == without.loss_mask


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ("[1", "column 'tools' of tools is not JSON"),
        ({"name": "add"}, "column 'tools' of tools is of type dict; give a list of objects"),
        (["add"], "column 'tools': tool 1 names no function; .* or name a column that is not there"),
        ([ADD, {"type": "function"}], "tool 2 names no function"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(source, tokenizer, tools, fault):
    with pytest.raises(InputError, match=f"rows.jsonl:1: .*{fault}"):
        load_prompts(source({"input": "1", "tools": tools}), CHAT, tokenizer)


def test_tools_are_given_once(source, tokenizer):
    data = DataArguments(apply_chat_template=True, apply_chat_template_kwargs='{"tools": []}')
    with pytest.raises(InputError, match="has tools, and --apply-chat-template-kwargs gives others"):
        load_prompts(source({"input": "1", "tools": [ADD]}), data, tokenizer)


def test_a_template_that_writes_no_tools_is_reported(source, base_tokenizer, caplog):
    plain = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    plain.chat_template = CHAT_TEMPLATE
    load_prompts(source({"input": "1", "tools": [ADD]}), CHAT, plain)
    assert "the chat template writes none, so the model does not see them" in caplog.text
