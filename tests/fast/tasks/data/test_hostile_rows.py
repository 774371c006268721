"""Whatever a file of prompts holds: its prompts are loaded, or one sentence names the place and the fault."""

import json
import logging
import math
import re
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.base.text import InputError
from miles.tasks.data.prompts import RowReader, load_prompts
from miles.tasks.data.row import LONGEST_MESSAGE
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments

LABELLED = DataArguments(label_key="label")
CUSTOM = RewardArguments(custom_rm_path="a:b")  # may not need labels
CHAT = DataArguments(label_key="label", apply_chat_template=True)
USER = {"role": "user", "content": "1+1"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}


def write_lines(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def write_rows(path, *rows):
    return write_lines(path, *map(json.dumps, rows))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (r'{"input": "a\ud83d", "label": "1"}', r"its text has \\ud83d, half of a surrogate pair"),
        (r'{"input": "a", "label": "1", "metadata": {"\udfff": 1}}', r"has \\udfff, half of a surrogate pair"),
        ('{"input": ' + "[" * 100_000, "nested more than 100 levels"),
        ('{"input": "a", "label": ' + "9" * 6000 + "}", "more than 4300 digits"),
        ('{"input": "a", "label": "1", "input": "b"}', "the key 'input' is in one object twice"),
        ('{"input": "a", "label": "1", "metadata": {"k": 1, "k": 1}}', "the key 'k' is in one object twice"),
        ('{"input": "a", "label": NaN}', "the label, column 'label', is nan; give a finite number"),
        ('{"input": "a", "label": 1e999}', "the label, column 'label', is inf"),
        ('{"input": "a", "label": []}', "the label, column 'label', is of type list; give text, a number or a list"),
        ('{"input": "a", "label": ["1", ["2"]]}', "the label, column 'label', is of type list"),
        ('{"input": "a", "label": ["1", null]}', "the label, column 'label', is of type NoneType"),
        ('{"input": "a", "label": {"x": 1}}', "the label, column 'label', is of type dict"),
        ('{"' + "x" * 100_000 + '": 1}', "no column 'input'"),
        ("\x1b[2J" * 1000, "not JSON"),
    ],
)
def test_faults_of_a_line(tmp_path, tokenizer, line, fault):
    source = write_lines(tmp_path / "bad.jsonl", '{"input": "fine", "label": "1"}', line)
    with pytest.raises(InputError, match=rf"bad\.jsonl:2: .*{fault}") as caught:
        load_prompts(source, LABELLED, tokenizer)
    assert str(caught.value).isprintable() and len(str(caught.value)) <= LONGEST_MESSAGE


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([{"role": "usr", "content": "x"}], "message 1: the chat template knows no role 'usr'; give one of system"),
        ([USER, {"role": "user", "content": " \n"}], "message 2: its content is empty"),
        ([CALLS | {"tool_calls": "x"}], "message 1: its tool_calls are of type str; give a list of objects"),
        ([CALLS | {"tool_calls": [1]}], "message 1: call 1 of its tool_calls names no function; give it a name"),
        ([CALLS | {"content": "a", "tool_calls": [{"function": "add"}]}], "message 1: call 1 of its tool_calls names"),
        ([CALLS], "message 1: its content is missing or null, and the chat template writes no tool_calls; give text"),
    ],
)
def test_faults_of_messages(tmp_path, tokenizer, messages, fault):
    source = write_rows(tmp_path / "chat.jsonl", {"input": messages, "label": "1"})
    with pytest.raises(InputError, match=f"chat.jsonl:1: {fault}"):
        load_prompts(source, CHAT, tokenizer)


@pytest.mark.parametrize(
    ("message", "written", "text"),
    [
        (CALLS, "{{ m.tool_calls[0].function.name }}", "add"),
        ({"role": "critic", "content": "no"}, "{% if m.role == 'critic' %}{{ m.content }}{% endif %}", "no"),
    ],
    ids=["calls without text", "a role that it names"],
)
def test_what_the_template_writes_is_allowed(tmp_path, base_tokenizer, monkeypatch, message, written, text):
    template = f"{{% for m in messages %}}{written}{{% endfor %}}"
    monkeypatch.setattr(base_tokenizer, "chat_template", template, raising=False)
    source = write_rows(tmp_path / "chat.jsonl", {"input": [message]})
    (prompt,) = load_prompts(source, DataArguments(apply_chat_template=True), base_tokenizer)
    assert prompt.text == text


def test_a_label_may_be_a_whole_number_that_no_float_holds(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", {"input": "a", "label": 10**400})
    (prompt,) = load_prompts(source, LABELLED, tokenizer, reward=RewardArguments(rm_type="math"))
    assert prompt.label == 10**400


@pytest.mark.parametrize("label", ["", " \n ", True])
def test_a_label_that_a_reward_of_the_run_cannot_read_is_refused(tmp_path, tokenizer, label):
    rows = [{"input": "a", "label": "1"}, {"input": "a", "label": label}]
    source = write_rows(tmp_path / "rows.jsonl", *rows)
    fault = f"--rm-type math: the label of the row is {re.escape(repr(label))}; it must be text or a number"
    with pytest.raises(InputError, match=rf"rows\.jsonl:2: {fault}"):
        load_prompts(source, LABELLED, tokenizer, reward=RewardArguments(rm_type="math"))
    with pytest.raises(InputError, match=f"^row 1 of --data-source-path: {fault}"):
        RowReader(LABELLED, tokenizer, reward=RewardArguments(rm_type="math"))(rows[1], 1)


@pytest.mark.parametrize(
    ("rm_type", "row", "fault"),
    [
        ("math", {"label": "\\boxed{}"}, "is not mathematics"),
        ("deepscaler,format:0.1", {"label": "\\frac{1}{"}, "--rm-type deepscaler: .* is not mathematics"),
        ("gemma_math", {"label": "$$"}, "is not mathematics"),
        ("dapo", {"label": "$ $."}, "states no value"),
        ("last_number", {"label": "seven"}, "holds no number"),
        ("last_number", {"label": ["7"]}, "must be text or a number"),
        ("exact_match", {"label": ["7", True]}, "must be text or a number"),
        ("f1", {"label": [" "]}, "must be text or a number"),
        ("gpqa", {"label": "E"}, "is none of the letters A to D"),
        ("regex", {"label": "("}, "is no pattern"),
        ("json_schema", {"label": '{"type": 3}'}, "is no JSON schema"),
        ("ifeval", {"label": "1"}, "has no instruction_id_list"),
        ("ifeval", {"label": '{"instruction_id_list": ["a:b"], "kwargs": [{}]}'}, "no instruction is named a:b"),
        ("python_code", {"label": "1", "metadata": {"inputs": ["1"], "outputs": []}}, "lists of one length"),
    ],
)
def test_a_row_that_a_reward_of_the_run_cannot_use_is_named_when_the_file_is_read(
    tmp_path, tokenizer, rm_type, row, fault
):
    source = write_rows(tmp_path / "rows.jsonl", {"input": "a"} | row)
    with pytest.raises(InputError, match=rf"^\S*rows\.jsonl:1: .*{fault}"):
        load_prompts(source, LABELLED, tokenizer, reward=RewardArguments(rm_type=rm_type))
    dropped = RewardArguments(rm_type=rm_type, reward_error="drop")
    assert load_prompts(source, LABELLED, tokenizer, reward=dropped)


def test_an_empty_message_that_calls_a_tool_is_allowed(tmp_path, tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    source = write_rows(tmp_path / "chat.jsonl", {"input": [USER, call, {"role": "tool", "content": "2"}], "label": 2})
    assert load_prompts(source, CHAT, tokenizer)[0].text.endswith("[assistant][tool]2[assistant]")


@pytest.mark.parametrize(
    ("rows", "data", "options", "note"),
    [
        (
            [{"input": "a", "label": 1}, {"input": [USER, {"role": "assistant", "content": "2"}], "label": 1}],
            CHAT,
            {},
            r"1 of 2 prompts: the last message is the assistant's, .*; the first is .*rows\.jsonl:2",
        ),
        (
            [{"input": '[{"a": 1}]', "label": 1}, {"input": json.dumps([USER]), "label": 1}],
            CHAT,
            {},
            r"1 of 2 prompts: the prompt is text that holds a list of messages as JSON, .*rows\.jsonl:2",
        ),
        (
            [{"input": "a", "label": True}, {"input": "a", "label": False}, {"input": "b", "label": "x"}],
            LABELLED,
            {},
            r"2 of 3 prompts: the label is true or false, .*; the first is .*rows\.jsonl:1",
        ),
        (
            [{"input": "a", "label": ""}, {"input": "a", "label": 1}, {"input": "b", "label": " "}],
            LABELLED,
            {},
            r"2 of 3 prompts: the label is text without a character, .*; the first is .*rows\.jsonl:1",
        ),
        (
            [{"input": "a", "label": 1}, {"input": "a"}, {"input": "b", "label": None}],
            LABELLED,
            {"reward": CUSTOM},
            r"2 of 3 prompts: there is no label, .*; the first is .*rows\.jsonl:2",
        ),
        (
            [{"input": "a"}, {"input": "b"}],
            DataArguments(),
            {"reward": CUSTOM},
            r"2 of 2 prompts: there is no label, as --label-key is not given, .*rows\.jsonl:1",
        ),
        (
            [{"input": "a"}, {"input": "b" * 50}, {"input": "b" * 60}],
            DataArguments(rollout_max_prompt_len=10),
            {},
            r"dropped 2 of 3 prompts of more than 10 tokens \(--rollout-max-prompt-len 10\); .*rows\.jsonl:2",
        ),
        (
            [{"input": "a"}, {"input": "b" * 50}],
            DataArguments(),
            {"max_context_len": 20},
            r"dropped 1 of 2 prompts of more than 19 tokens \(--rollout-max-context-len 20\); .*rows\.jsonl:2",
        ),
        (
            [{"input": "a"}, {"input": "<s>b"}],
            DataArguments(),
            {},
            r"1 of 2 prompts: the text has a special token, which is read as that token; .*rows\.jsonl:2",
        ),
    ],
)
def test_what_may_surprise_is_counted_in_one_line(tmp_path, tokenizer, caplog, rows, data, options, note):
    source = write_rows(tmp_path / "rows.jsonl", *rows)
    with caplog.at_level(logging.WARNING):
        load_prompts(source, data, tokenizer, **options)
    assert len(caplog.records) == 1
    assert re.search(note, caplog.records[0].getMessage()), caplog.text


def test_a_label_key_that_no_row_has_is_refused_under_a_custom_reward_too(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", {"input": "a", "labels": 1})
    with pytest.raises(InputError, match="no column 'label'; did you mean labels"):
        load_prompts(source, LABELLED, tokenizer, reward=CUSTOM)


SPECIAL = "</s><s>[assistant]"


@pytest.mark.parametrize("messages", [[USER | {"content": SPECIAL}], SPECIAL], ids=["messages", "text"])
def test_special_tokens_in_a_message_are_text(tmp_path, tokenizer, caplog, messages):
    source = write_rows(tmp_path / "chat.jsonl", {"input": messages, "label": 1}, {"input": "1+1", "label": 2})
    with caplog.at_level(logging.WARNING):
        prompt, plain = load_prompts(source, CHAT, tokenizer)
    assert "1 of 2 prompts: a message has the text of a special token, which is read as text" in caplog.text
    assert prompt.text == f"<s>[user]{SPECIAL}[assistant]"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1, "the template's own"
    assert prompt.token_ids[0] == plain.token_ids[0] == tokenizer.bos_token_id


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.sampled_from(["<s>", "a", " ", "\U000f0000", "é", "<s"]), min_size=1, max_size=6))
def test_hiding_special_tokens_changes_no_text(tmp_path, tokenizer, contents):
    content = "x" + "".join(contents)
    source = write_rows(tmp_path / "chat.jsonl", {"input": content, "label": 1})
    (prompt,) = load_prompts(source, CHAT, tokenizer)
    assert prompt.text == f"<s>[user]{content}[assistant]"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1


def test_a_broken_page_of_a_parquet_file_names_file_and_row(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    rows = [{"input": f"{i:05d}" * 40, "label": str(i)} for i in range(4000)]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="snappy", use_dictionary=False, row_group_size=1000)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = b"\xff" * 4000
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"rows\.parquet:\d+: the rows from here on cannot be read"):
        load_prompts(str(path), LABELLED, tokenizer)


def test_a_parquet_file_with_a_column_twice(tmp_path, tokenizer):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["input", "input"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"rows\.parquet: it has 'input' as the name of two columns"):
        load_prompts(str(tmp_path / "rows.parquet"), DataArguments(), tokenizer)


def test_a_truncated_parquet_file(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"input": "a"}]), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not a Parquet file"):
        load_prompts(str(path), DataArguments(), tokenizer)


@pytest.mark.parametrize(
    "source", ["a" * 10_000 + ".jsonl", "a" * 10_000, "hf:" + "a" * 10_000, "reasoning_gym:" + "a" * 10_000]
)
def test_names_that_are_too_long(tokenizer, source):
    with pytest.raises(InputError) as caught:
        load_prompts(source, DataArguments(), tokenizer)
    assert len(str(caught.value)) <= LONGEST_MESSAGE and str(caught.value).isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800") | st.just("<s>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "bad"]), "content": JSON})
ROW = st.fixed_dictionaries({"input": JSON | st.lists(MESSAGE, max_size=3)}, optional={"label": JSON, "metadata": JSON})
LINE = ROW.map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=20)


def for_long(examples):
    """Return the parameter of a slow test of many examples."""
    return pytest.param(examples, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("examples", [150, for_long(5_000)])
def test_any_lines(tmp_path, tokenizer, examples):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(
        lines=st.lists(LINE, min_size=1, max_size=4),
        cut=st.integers(0, 5),
        data=st.sampled_from([DataArguments(), LABELLED, CHAT]),
        optional=st.booleans(),
    )
    def check(lines, cut, data, optional):
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        path = tmp_path / "any.jsonl"
        path.write_bytes(content[: len(content) - cut])
        try:
            loaded = load_prompts(str(path), data, tokenizer, reward=CUSTOM if optional else None)
        except InputError as error:
            for message in str(error).split("\n"):
                assert "any.jsonl" in message and message.isprintable() and len(message) <= LONGEST_MESSAGE
            return
        for prompt in loaded:
            assert prompt.token_ids and isinstance(prompt.metadata, dict)
            assert prompt.label is None or isinstance(prompt.label, str | int | float)
            assert not isinstance(prompt.label, float) or math.isfinite(prompt.label)
            assert prompt.label is not None or data.label_key is None or optional

    check()


@pytest.mark.parametrize("examples", [30, for_long(1_500)])
def test_any_bytes_of_parquet(tmp_path, tokenizer, examples):
    path = tmp_path / "any.parquet"

    @settings(max_examples=examples)
    @given(st.lists(st.tuples(st.integers(4, 4000), st.integers(0, 255)), min_size=1, max_size=4))
    def check(changes):
        pq.write_table(pa.Table.from_pylist([{"input": "a" * n, "label": str(n)} for n in range(1, 60)]), path)
        content = bytearray(path.read_bytes())
        for place, value in changes:
            content[place % len(content)] = value
        path.write_bytes(content)
        try:
            load_prompts(str(path), LABELLED, tokenizer)
        except InputError as error:
            assert "any.parquet" in str(error) and str(error).replace("\n", "").isprintable()

    check()


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_a_number_of_a_column_is_the_shortest_decimal_of_its_width(tmp_path, tokenizer, form):
    numbers = pa.array([0.1, 1e-7, 3.0], pa.float32())
    table = pa.table(
        {
            "input": ["a", "b", "c"],
            "float": numbers,
            "half": numbers.cast(pa.float16(), safe=False),
            "decimal": pa.array([Decimal("18.90"), Decimal("0.10"), Decimal("42.00")]),
            "inner": pa.array(
                [{"x": [value]} for value in numbers.to_pylist()], pa.struct({"x": pa.list_(numbers.type)})
            ),
        }
    )
    source = str(tmp_path / "rows.parquet")
    if form == "parquet":
        pq.write_table(table, source)
    else:
        import datasets  # slow to import

        source = str(tmp_path / "folder")
        datasets.Dataset(table.drop_columns(["half"])).save_to_disk(source)
    wanted = {"float": [0.1, 1e-7, 3], "decimal": [18.9, 0.1, 42], "inner.x": [[0.1], [1e-7], [3]]}
    if form == "parquet":
        wanted["half"] = [0.1, 1e-7, 3]
    for name, labels in wanted.items():
        prompts = load_prompts(source, DataArguments(label_key=name), tokenizer)
        assert [prompt.label for prompt in prompts] == labels, name
