"""Which tokens of a conversation are trained on."""

import json
from os.path import commonprefix

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from miles.base.text import InputError
from miles.tasks.data.conversations import load_conversations
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.tokenizer import SpecialTokens

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# An earlier turn of the assistant loses its first word, as models lose their reasoning.
SHORTENED = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split(' ', 1)[1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "it is 4"},
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "it is so"},
]


@pytest.fixture
def trained(base_tokenizer, tmp_path):
    """Return a call that loads one conversation, and gives its prompt and the pieces of text with mask 1."""

    def load(messages, template=TURNS, **limits):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
        tokenizer.chat_template = template
        file = tmp_path / "chats.jsonl"
        file.write_text(json.dumps({"messages": messages}) + "\n")
        roles = limits.pop("roles", ("assistant",))
        data = DataArguments(prompt_data=str(file), input_key="messages", sft_roles=roles)
        [sample] = load_conversations(str(file), data, tokenizer, **limits)
        assert sample.prompt.token_ids == tuple(tokenizer(sample.prompt.text, add_special_tokens=False)["input_ids"])
        pieces, text = [], tokenizer.convert_ids_to_tokens(list(sample.response_ids))
        for token, mask, before in zip(text, sample.loss_mask, (0, *sample.loss_mask), strict=False):
            pieces += [""] if mask and not before else []
            pieces[-1] += token.replace("Ġ", " ").replace("Ċ", "\n") if mask else ""
        return sample.prompt.text, pieces

    return load


def test_the_turns_of_the_assistant_are_trained_on_with_their_ends(trained):
    prompt, pieces = trained(CHAT)
    assert prompt == "<system>be brief<end>\n<user>2+2?<end>\n<assistant>"
    assert pieces == ["it is 4<end>", "it is so<end>"]


NEXT_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ tail | default('') }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize("tail", ["", "\n"])
def test_the_next_roles_token_ends_a_turn_where_the_template_writes_no_other(base_tokenizer, tmp_path, tail):
    """As in GLM-4.5. Also a test that the kwargs of templates reach conversations."""
    names = {"additional_special_tokens": ["<|user|>", "<|assistant|>"]}
    backend = Tokenizer.from_str(base_tokenizer.backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", **names)
    tokenizer.chat_template = NEXT_ROLE
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT[1:]}) + "\n")
    kwargs = {"tail": tail, "continue_final_message": True}  # conversations are whole, so the latter has no effect
    data = DataArguments(input_key="messages", apply_chat_template_kwargs=json.dumps(kwargs))
    [sample] = load_conversations(str(file), data, tokenizer)
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == f"it is 4{tail}<|user|>it is so<|user|>"


def test_a_template_without_an_end_of_turn_is_reported(trained, caplog):
    trained(CHAT, "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}")
    assert "1 of 1 prompts: the chat template writes no token that ends the turn" in caplog.text


def test_metadata_that_is_no_object_is_counted(base_tokenizer, tmp_path, caplog):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    tokenizer.chat_template = TURNS
    file = tmp_path / "chats.jsonl"
    rows = [{"messages": CHAT, "metadata": metadata} for metadata in ({"a": 1}, "text", None, [])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = load_conversations(str(file), DataArguments(input_key="messages"), tokenizer)
    assert [one.prompt.metadata for one in samples] == [{"a": 1}, {}, {}, {}]
    [record] = caplog.records
    assert "2 of 4 prompts: the metadata, column --metadata-key, is no object" in record.getMessage()
    assert record.getMessage().endswith("chats.jsonl:2")


def test_other_roles_are_trained_on_if_they_are_named(trained):
    assert trained(CHAT, roles=("user",))[1] == ["<user>2+2?<end>", "<user>why?<end>"]
    assert len(trained(CHAT, roles=("user", "assistant"))[1]) == 4


def test_a_turn_that_the_template_changes_is_refused_and_the_last_one_is_found(trained):
    with pytest.raises(
        InputError, match=r"chats.jsonl:1: the chat template changes message 3, so its tokens are not known"
    ):
        trained(CHAT, SHORTENED)
    assert trained(CHAT[:3], SHORTENED)[1] == ["it is 4<end>"]
    assert trained(CHAT, SHORTENED.replace("split(' ', 1)[1]", "strip()"))[1] == ["it is 4<end>", "it is so<end>"]


def test_a_turn_is_found_where_earlier_ones_are_written_in_another_way(trained):
    marked = SHORTENED.replace("{{ m.content.split(' ', 1)[1] }}", "(earlier){{ m.content }}")
    assert trained(CHAT, marked)[1] == ["it is 4<end>", "it is so<end>"]


@pytest.mark.parametrize("answer", ["a", "e", "en", "think"])
def test_a_short_answer_is_not_found_in_a_header_or_in_another_turn(trained, answer):
    thinks = TURNS.replace(
        "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    )
    chat = [{"role": role, "content": answer} for role in ("system", "user", "assistant", "user", "assistant")]
    prompt, pieces = trained(chat, thinks)
    assert prompt == f"<system>{answer}<end>\n<user>{answer}<end>\n<assistant>"
    assert pieces == [f"{answer}<end>", f"<think></think>{answer}<end>"]


LAST_END = TURNS.replace("<end>", "{{ '<last>' if loop.last and m.role == 'assistant' else '<end>' }}")  # as gpt-oss
CLOSED = TURNS.replace("{% endif %}", "{% else %}<closed>{% endif %}")  # as Phi-3


@pytest.mark.parametrize("answers", [("it is 4", "so"), ("a", "a"), ("e", "end"), (" so ", "\n4\n")])
@pytest.mark.parametrize(("template", "end"), [(LAST_END, "<last>"), (CLOSED, "<end>\n<closed>")])
def test_the_end_of_a_whole_conversation_is_not_awaited_at_an_earlier_turn(
    base_tokenizer, tmp_path, template, end, answers
):
    names = ["<end>", "<last>", "<closed>", "<user>", "<assistant>"]
    backend = Tokenizer.from_str(base_tokenizer.backend_tokenizer.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", additional_special_tokens=names)
    tokenizer.chat_template = template
    chat = [{"role": role, "content": text} for text in answers for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    [sample] = load_conversations(str(tmp_path / "chats.jsonl"), DataArguments(input_key="messages"), tokenizer)
    trained = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == f"{answers[0]}<end>{answers[1]}{end}"


THINKS = TURNS.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>{{ m.reason }}</think>{% endif %}{{ m.content }}"
).replace("<assistant>{% endif", "<assistant><think></think>{% endif")
CALLS = TURNS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '/' if m.content or not loop.first }}[{{ c.function.name }}]{% endfor %}",
).replace("'/'", r"'\n'")


def test_reasoning_is_trained_on_though_a_prompt_leaves_none(trained):
    """As Qwen3.5 opens the turn if it is not to think."""
    chat = [message | {"reason": "well"} if "it is" in message["content"] else message for message in CHAT]
    prompt, pieces = trained(chat, THINKS)
    assert prompt == "<system>be brief<end>\n<user>2+2?<end>\n<assistant><think>"
    assert pieces == ["well</think>it is 4<end>", "well</think>it is so<end>"]


@pytest.mark.parametrize("content", ["", "see"])
def test_calls_are_trained_on_where_earlier_turns_are_written_in_another_way(trained, content):
    """As by Qwen3, which writes an empty block of reasoning into the last turn alone."""
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("add", "mul")]
    chat = [CHAT[1], {"role": "assistant", "content": content, "tool_calls": calls}, {"role": "tool", "content": "4"}]
    _, pieces = trained([*chat, CHAT[2]], CALLS)
    assert pieces == [f"{content}\n[add]\n[mul]<end>".lstrip(), "<think></think>it is 4<end>"]


def test_a_part_of_a_message_that_the_template_leaves_out_is_reported(trained, caplog):
    trained(CHAT, TURNS)
    assert "leaves out" not in caplog.text
    trained(CHAT, TURNS.replace("m.content", "m.content.removeprefix('it is ')"))
    assert "1 of 1 prompts: the chat template leaves out a part of a trained message" in caplog.text


@pytest.mark.parametrize(
    ("messages", "limits", "expected"),
    [
        (CHAT[:2], {}, "no message has a role of --sft-roles assistant"),
        ("text", {}, "trains on a list of chat messages"),
        (["text"], {}, "message 1 is of type str"),
        *(
            ([CHAT[1], {"role": "assistant", "content": [part]}], {}, "message 2: its content is of type list")
            for part in ("text", 3, {"type": "text"}, {"text": "a"}, {"type": "text", "text": 3})
        ),
        ([], {}, "the conversation is empty"),
        (CHAT, {"max_context_len": 20}, "all 1 conversations are longer than a limit"),
        (CHAT, {"max_response_len": 5}, "all 1 conversations are longer than a limit"),
        ([{"role": "user", "content": "a <s> b"}, CHAT[2]], {}, "the text of a special token"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(trained, messages, limits, expected):
    with pytest.raises(InputError, match=expected):
        trained(messages, **limits)


PARTS = st.lists(st.sampled_from(["<user>", "<end>", "<e", "it is", " so", "\n", "4", "<a>"]), max_size=12).map("".join)


@given(PARTS, PARTS, PARTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_beginning_that_two_texts_share_is_that_of_their_tokens(base_tokenizer, common, one, other):
    backend = Tokenizer.from_str(base_tokenizer.backend_tokenizer.to_str())
    names = ["<user>", "<end>", "<a>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=names)
    texts = [common + one, common + other]
    encoded = [tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in texts]
    number = len(commonprefix([each["input_ids"] for each in encoded]))
    expected = encoded[0]["offset_mapping"][number - 1][1] if number else 0
    assert SpecialTokens(tokenizer).common_prefix(*texts) == expected


class CountingTokenizer(PreTrainedTokenizerFast):
    read = 0

    def __call__(self, text, **kwargs):
        CountingTokenizer.read += len(text)
        return super().__call__(text, **kwargs)


def test_a_long_conversation_is_tokenized_a_few_times_and_not_for_each_turn(base_tokenizer, tmp_path):
    backend = Tokenizer.from_str(base_tokenizer.backend_tokenizer.to_str())
    names = ["<end>", "<last>", "<user>", "<assistant>"]
    tokenizer = CountingTokenizer(tokenizer_object=backend, additional_special_tokens=names)
    tokenizer.chat_template = LAST_END
    chat = [{"role": role, "content": f"it is {n}"} for n in range(50) for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    CountingTokenizer.read = 0
    load_conversations(str(tmp_path / "chats.jsonl"), DataArguments(input_key="messages"), tokenizer)
    assert CountingTokenizer.read < 10 * sum(len(f"<{m['role']}>{m['content']}<end>\n") for m in chat)
