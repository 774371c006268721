import json
import logging
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from miles.base.text import InputError
from miles.tasks.data.prompts import RowReader, load_prompts
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments

ROWS = [
    {"input": "2*3=", "label": "6", "metadata": {"level": 1}},
    {"input": "7*8=", "label": "56", "metadata": {"level": 2}},
]
LABELLED = DataArguments(label_key="label")
CUSTOM = RewardArguments(custom_rm_path="a:b")  # may not need labels


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def sources(tmp_path):
    """Write the same rows to every kind of source."""
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    import datasets  # slow to import, which every worker of pytest-xdist would do

    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(str(tmp_path / "splits"))
    return {
        "jsonl": write_jsonl(tmp_path / "rows.jsonl", ROWS),
        "parquet": str(tmp_path / "rows.parquet"),
        "folder": str(tmp_path / "saved"),
        "hf folder": f"hf:{tmp_path / 'saved'}",
        "splits": f"hf:{tmp_path / 'splits'}",
        "test split": f"hf:{tmp_path / 'splits'}:test",
    }


def test_every_form_gives_the_same_prompts(sources, tokenizer):
    sets = {form: load_prompts(source, LABELLED, tokenizer) for form, source in sources.items()}
    facts = {form: [(p.text, p.token_ids, p.label, p.metadata) for p in prompts] for form, prompts in sets.items()}
    assert facts["test split"] == facts["jsonl"][1:]
    del facts["test split"]
    assert all(each == facts["jsonl"] for each in facts.values())
    assert [(text, label, meta) for text, _, label, meta in facts["jsonl"]] == [tuple(r.values()) for r in ROWS]
    for form, prompts in sets.items():
        assert [p.source for p in prompts] == [f"{sources[form]}:{i + 1}" for i in range(len(prompts))]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_raw_text_is_tokenized_as_the_tokenizer_does_by_default(texts, tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "any.jsonl", [{"input": text} for text in texts])
    for prompt, text in zip(load_prompts(source, DataArguments(), tokenizer), texts, strict=True):
        assert (prompt.text, prompt.label, prompt.metadata) == (text, None, {})
        assert list(prompt.token_ids) == tokenizer(text)["input_ids"]
        assert tokenizer.decode(prompt.token_ids, skip_special_tokens=True) == text


def test_chat_template_gives_its_special_tokens_once(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+1"}]
    source = write_jsonl(tmp_path / "chat.jsonl", [{"input": messages}, {"input": "1+1"}])
    data = DataArguments(apply_chat_template=True, apply_chat_template_kwargs='{"opening": "<think>"}')
    chat, wrapped = load_prompts(source, data, tokenizer)
    assert chat.text == "<s>[system]Sum.[user]1+1[assistant]<think>"
    assert wrapped.text == "<s>[user]1+1[assistant]<think>"
    assert wrapped.token_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(wrapped.token_ids) == wrapped.text


PREFILL = {"role": "assistant", "content": "Let me think. "}
ENDED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("kwargs", [{"add_generation_prompt": False}, {}])
def test_a_last_message_of_the_assistant_is_continued(tmp_path, base_tokenizer, caplog, kwargs):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base_tokenizer.backend_tokenizer, bos_token="<s>")
    tokenizer.chat_template = ENDED
    kwargs = {"continue_final_message": True, **kwargs}
    user, named = {"role": "user", "content": "2+2?"}, {"role": "user", "content": "<s>"}
    rows = [{"input": [user, PREFILL]}, {"input": [named, PREFILL]}, {"input": [user]}, {"input": "2+2?"}]
    data = DataArguments(apply_chat_template=True, apply_chat_template_kwargs=json.dumps(kwargs))
    prompts = load_prompts(write_jsonl(tmp_path / "prefill.jsonl", rows), data, tokenizer)
    expected = tokenizer.apply_chat_template(rows[0]["input"], tokenize=False, continue_final_message=True)
    assert prompts[0].text == expected == "<user>2+2?<end><assistant>Let me think. "
    assert prompts[1].text == "<user><s><end><assistant>Let me think. " and 0 not in prompts[1].token_ids
    assert [prompt.text for prompt in prompts[2:]] == ["<user>2+2?<end><assistant>"] * 2
    assert [prompt.prefill for prompt in prompts] == ["Let me think. "] * 2 + [""] * 2
    assert "2 of 4 prompts: the last message is not the assistant's, so nothing is continued" in caplog.text
    assert "a new turn of the assistant" not in caplog.text


def test_only_what_begins_the_answer_is_prefill(tokenizer, tmp_path):
    rows = [{"input": [{"role": "user", "content": "[assistant]"}, {"role": "assistant", "content": "a"}]}]
    data = DataArguments(apply_chat_template=True)
    [prompt] = load_prompts(write_jsonl(tmp_path / "turn.jsonl", rows), data, tokenizer)
    assert prompt.text.endswith("[assistant]a[assistant]") and prompt.prefill == ""


@pytest.mark.parametrize("data", [DataArguments(), DataArguments(apply_chat_template=True)], ids=["text", "template"])
@pytest.mark.parametrize("limit", [None, "prompt", "context", "both"])
def test_the_users_own_source_reads_rows_as_a_file_does(tmp_path, tokenizer, data, limit):
    rows = [{"input": "a" * n + "<s>" * (n == 3)} for n in range(1, 9)]
    longest = len(load_prompts(write_jsonl(tmp_path / "rows.jsonl", rows), data, tokenizer)[4].token_ids)
    context = None
    if limit in ("prompt", "both"):
        data = replace(data, rollout_max_prompt_len=longest)
    if limit in ("context", "both"):
        context = longest if limit == "both" else longest + 1
    in_file = load_prompts(str(tmp_path / "rows.jsonl"), data, tokenizer, max_context_len=context)
    assert max(len(prompt.token_ids) for prompt in in_file) == (
        len(in_file[-1].token_ids) if limit is None else context - 1 if context else longest
    )
    read, own = RowReader(data, tokenizer, max_context_len=context), []
    for number, row in enumerate(rows):
        try:
            own.append(read(row, number))
        except InputError as error:
            assert "at most" in str(error)
    assert [(p.text, p.token_ids) for p in own] == [(p.text, p.token_ids) for p in in_file]


def test_a_label_may_be_absent_in_the_first_row_for_a_custom_reward(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"input": "a"}, {"input": "b", "label": "1"}])
    prompts = load_prompts(source, LABELLED, tokenizer, reward=CUSTOM)
    assert [prompt.label for prompt in prompts] == [None, "1"]


def test_keys_given_replace_those_of_the_flags(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "q.jsonl", [{"question": "1+1", "answer": 2, "input": "no", "label": "no"}])
    (prompt,) = load_prompts(source, LABELLED, tokenizer, input_key="question", label_key="answer")
    assert (prompt.text, prompt.label) == ("1+1", 2)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), limit=st.integers(2, 14))
def test_long_prompts_are_dropped_and_counted(lengths, limit, tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "long.jsonl", [{"input": "a" * n} for n in lengths])
    data = DataArguments(rollout_max_prompt_len=limit)
    fitting = [n for n in lengths if n + 1 <= limit]  # one more for the beginning-of-sequence token
    if not fitting:
        with pytest.raises(ValueError, match=f"--rollout-max-prompt-len {limit}: drops all"):
            load_prompts(source, data, tokenizer)
        return
    loaded = load_prompts(source, data, tokenizer)
    assert [len(p.text) for p in loaded] == fitting
    assert loaded.verdict.dropped == len(lengths) - len(fitting)


def test_dropped_prompts_are_logged(tmp_path, tokenizer, caplog):
    source = write_jsonl(tmp_path / "long.jsonl", [{"input": "a"}, {"input": "a" * 50}])
    with caplog.at_level(logging.WARNING):
        load_prompts(source, DataArguments(rollout_max_prompt_len=10), tokenizer)
    assert "dropped 1 of 2 prompts of more than 10 tokens" in caplog.text


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"input": "x"', "not JSON .* write one JSON object per line"),
        ('["x"]', "a list, not an object"),
        (
            '{"inptu": "x", "label": "1"}',
            "no column 'input'; did you mean inptu\\? .* are: inptu, label; .*--input-key",
        ),
        ('{"input": 7, "label": "1"}', "the prompt is of type int; give text or a list"),
        ('{"input": " ", "label": "1"}', "the prompt is empty"),
        ('{"input": [], "label": "1"}', "the prompt is empty"),
        ('{"input": null, "label": "1"}', "column 'input' is null"),
        ('{"input": "x"}', "no column 'label'.*--label-key"),
        ('{"input": "x", "label": null}', "column 'label' is null"),
        ('{"input": "x", "label": "1", "metadata": 3}', "column 'metadata' is of type int; .*--metadata-key"),
        ('{"input": [{"role": "user"}], "label": "1"}', "a list of chat messages; add --apply-chat-template"),
        (b'{"input": "\xff"}', "not UTF-8"),
    ],
)
def test_malformed_rows_are_named_with_fault_and_solution(line, fault, tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"input": "fine", "label": "1"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: (?s:.*){fault}"):
        load_prompts(str(path), LABELLED, tokenizer)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([7], "message 1 is of type int"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 2: its content is missing or null"),
        ([{"role": 1, "content": "x"}], "message 1: its role is of type int"),
    ],
)
def test_malformed_messages(messages, fault, tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "chat.jsonl", [{"input": messages}])
    with pytest.raises(ValueError, match=f"chat.jsonl:1: {fault}"):
        load_prompts(source, DataArguments(apply_chat_template=True), tokenizer)


def test_parquet_faults_name_the_row(tmp_path, tokenizer):
    pq.write_table(pa.Table.from_pylist([{"input": "x"}, {"input": ""}]), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet:2: the prompt is empty"):
        load_prompts(str(tmp_path / "bad.parquet"), DataArguments(), tokenizer)


def test_sources_that_cannot_be_read(tmp_path, tokenizer, sources):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "not.parquet").write_text("text")
    for source, fault in {
        str(tmp_path / "empty.jsonl"): "it is empty",
        str(tmp_path / "not.parquet"): "not a Parquet file",
        str(tmp_path / "absent.jsonl"): "no such file",
        "prompts.csv": "not a prompt source; give FILE.jsonl",
        sources["splits"] + ":dev": "no split dev; it has train, test",
        f"hf:{tmp_path / 'nowhere'}": "datasets cannot load it",
        "reasoning_gym:gdc": "no task 'gdc'; near it: .*gcd",
        "reasoning_gym:nosuch": "no task 'nosuch'; its documentation lists them",
        "reasoning_gym:gcd:size": "'size' is not key=value",
        "reasoning_gym:gcd:sise=3": "reasoning_gym refuses these settings",
        "reasoning_gym:gcd:size=-1": "gcd:size=-1: size must be a whole number from 1 to 10000000; write size=1000",
        "reasoning_gym:gcd:size=nan": "gcd:size=nan: size must be a whole number",
        "reasoning_gym:gcd:size=1e999": "gcd:size=1e999: size must be a whole number",
        "reasoning_gym:gcd:size=true": "gcd:size=true: size must be a whole number",
        "reasoning_gym:gcd:size=99999999999999999999": "size must be a whole number from 1 to 10000000",
        "reasoning_gym:gcd:size=3,seed=abc": "seed=abc: seed must be a whole number of at most 64 bits; write seed=1",
        "reasoning_gym:gcd:size=3,size=4": "prompt source reasoning_gym:gcd:size=3,size=4: 'size' is given twice; keep",
        "reasoning_gym:gcd:size=3,max_value=1e999": "max_value=1e999: reasoning_gym refuses these settings",
    }.items():
        with pytest.raises(ValueError, match=fault):
            load_prompts(source, DataArguments(), tokenizer)


def test_chat_template_flags_that_cannot_work(tmp_path, base_tokenizer):
    source = write_jsonl(tmp_path / "one.jsonl", [{"input": "x"}])
    with pytest.raises(ValueError, match="--apply-chat-template: the tokenizer has no chat template"):
        load_prompts(source, DataArguments(apply_chat_template=True), base_tokenizer)
    with pytest.raises(ValueError, match="--apply-chat-template-kwargs: would be ignored"):
        load_prompts(source, DataArguments(apply_chat_template_kwargs='{"a": 1}'), base_tokenizer)


def test_reasoning_gym_is_fixed_by_its_settings_and_has_its_own_columns(tokenizer):
    source = "reasoning_gym:gcd:size=5,seed=3"
    prompts = load_prompts(source, DataArguments(input_key="other", label_key="other"), tokenizer)
    assert list(prompts) == list(load_prompts(source, DataArguments(), tokenizer))
    assert list(prompts) != list(load_prompts("reasoning_gym:gcd:size=5,seed=4", DataArguments(), tokenizer))
    for prompt in prompts:
        origin = prompt.metadata["reasoning_gym"]
        assert (origin["task"], origin["options"]) == ("gcd", {"seed": 3, "size": 5})
        assert (origin["entry"]["question"], origin["entry"]["answer"]) == (prompt.text, prompt.label)


def test_a_part_of_a_column_is_named_with_a_dot(tmp_path, tokenizer):
    rows = [
        {"ask": {"text": "2*3="}, "reward_model": {"style": "rule", "ground_truth": "6"}},
        {"ask": {"text": "7*8="}, "reward_model": {"style": "rule", "ground_truth": "56"}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"ask.text": "a column of that name", "reward_model": {}}])
    named = DataArguments(input_key="ask.text", label_key="reward_model.ground_truth")
    prompts = load_prompts(str(tmp_path / "rows.parquet"), named, tokenizer)
    assert [(prompt.text, prompt.label) for prompt in prompts] == [("2*3=", "6"), ("7*8=", "56")]
    last = load_prompts(path, named, tokenizer, reward=CUSTOM)[-1]
    assert (last.text, last.label) == ("a column of that name", None)
    with pytest.raises(InputError, match=r"rows.jsonl:3: no column 'reward_model.ground_truth'"):
        load_prompts(path, named, tokenizer)
