"""Every form of a source gives the same rows, and names the same places."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from miles.base.text import InputError
from miles.tasks.data.prompts import load_prompts
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.sources import open_rows

DUMP = "{{ tools | tojson }}{% for m in messages %}[{{ m | tojson }}]{% endfor %}"  # shows every null
ASKS = "{% for m in messages %}{% if m.content is none %}(no text){% else %}{{ m.content }}{% endif %}{% endfor %}"
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


ROWS = [
    {"input": [turn("user", "1+1")], "tools": [tool("add", a={"type": "int"})], "metadata": {"level": {"a": 1}}},
    {
        "input": [turn("user", "2"), turn("assistant", "", tool_calls=[CALL]), turn("tool", "2", name="add")],
        "tools": [tool("add", b={"type": "int", "enum": [1, None]}), tool("sub", c={"items": {"type": "int"}})],
        "metadata": {"other": [{"x": 1}, {"y": 2}]},
    },
    {"input": [turn("user", "3")], "tools": [], "metadata": {}},
]


def write_all(folder, rows, as_json=False):
    """Write rows as JSON lines, as Parquet, and as a folder of datasets; objects as Arrow's JSON with ``as_json``."""
    import datasets  # slow to import

    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    if as_json:
        one = datasets.Json()
        kinds = {"input": datasets.List(one), "tools": datasets.List(one), "metadata": one}
        table = datasets.Dataset.from_list(rows, features=datasets.Features(kinds))
        table.to_parquet(folder / "rows.parquet")
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    table.save_to_disk(str(folder / "saved"))
    return [str(lines), str(folder / "rows.parquet"), f"hf:{folder / 'saved'}"]


@pytest.mark.parametrize("as_json", [False, True], ids=["structs", "JSON"])
def test_keys_that_only_other_rows_have_are_absent(tmp_path, base_tokenizer, as_json):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    tokenizer.chat_template = DUMP
    data = DataArguments(apply_chat_template=True)
    expected = [tokenizer.apply_chat_template(row["input"], tools=row["tools"] or None, tokenize=False) for row in ROWS]
    for source in write_all(tmp_path, ROWS, as_json):
        prompts = load_prompts(source, data, tokenizer)
        assert [prompt.text for prompt in prompts] == expected, source
        assert [prompt.metadata for prompt in prompts] == [row["metadata"] for row in ROWS], source


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "absent"])
def test_a_template_that_asks_for_null_content_gets_it(tmp_path, base_tokenizer, content):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    tokenizer.chat_template = ASKS + "{# tool_calls #}"
    rows = [{"input": [turn("user", "1"), {"role": "assistant", "tool_calls": [CALL], **content}]}]
    for source in write_all(tmp_path, rows):
        [prompt] = load_prompts(source, DataArguments(apply_chat_template=True), tokenizer)
        assert prompt.text == "1(no text)"


def test_a_null_of_json_lines_stays(tmp_path, base_tokenizer):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    tokenizer.chat_template = DUMP
    row = {"input": [turn("user", "1")], "tools": [tool("add", a={"default": None})]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [prompt] = load_prompts(str(tmp_path / "rows.jsonl"), DataArguments(apply_chat_template=True), tokenizer)
    assert '"default": null' in prompt.text


def rows_of(path):
    rows = open_rows(str(path))
    return list(rows.read(0, len(rows)))


def test_a_byte_order_mark_is_not_data(tmp_path):
    lines = b'{"input": "a"}\n{"input": "b"}\n'
    for name, content in {"plain": lines, "marked": b"\xef\xbb\xbf" + lines}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    plain, marked = ([row.columns for row in rows_of(tmp_path / f"{n}.jsonl")] for n in ("plain", "marked"))
    assert marked == plain == [{"input": "a"}, {"input": "b"}]


def test_rows_are_counted_through_all_batches_of_a_file(tmp_path, tokenizer):
    count = 70_000  # more than pyarrow reads at once
    pq.write_table(pa.table({"input": ["x"] * (count - 1) + [""]}), tmp_path / "many.parquet", row_group_size=30_000)
    rows = rows_of(tmp_path / "many.parquet")
    assert [int(row.where.rpartition(":")[2]) for row in rows] == list(range(1, count + 1))
    with pytest.raises(InputError, match=rf"many\.parquet:{count}: the prompt is empty"):
        load_prompts(str(tmp_path / "many.parquet"), DataArguments(), tokenizer)
