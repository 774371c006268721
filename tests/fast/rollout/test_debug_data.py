import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_groups import scored_group

from miles.rollout.debug_data import load_rollout, save_rollout
from miles.sample import Prompt, PromptGroup, Sample, SampleStatus

FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(), max_size=12)  # lone surrogates and line separators too
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
PROMPTS = st.builds(
    Prompt,
    text=TEXT,
    token_ids=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    label=JSON_VALUES,
    metadata=st.dictionaries(TEXT, JSON_VALUES, max_size=2),
    source=TEXT,
)


@st.composite
def groups(draw):
    group = PromptGroup(draw(st.integers(0, 10**9)), draw(PROMPTS))
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, 3))
        group.samples.append(
            Sample(
                prompt=draw(st.just(group.prompt) | PROMPTS),
                group_index=group.group_index,
                trajectory_id=draw(st.none() | st.integers(0)),
                response_ids=draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n)),
                response=draw(TEXT),
                loss_mask=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
                rollout_log_probs=draw(st.lists(FLOATS, min_size=n, max_size=n)),
                status=draw(st.sampled_from(SampleStatus)),
                reward=draw(st.none() | FLOATS),
                weight_versions=draw(st.lists(st.integers(-1), min_size=n, max_size=n)),
            )
        )
    return group


@given(st.lists(groups(), min_size=1, max_size=3), st.integers(0, 99))
def test_saved_groups_are_restored_exactly(saved, iteration):
    with tempfile.TemporaryDirectory() as folder:
        template = f"{folder}/new/rollout_{{rollout_id}}.jsonl"
        save_rollout(template, iteration, saved)
        assert load_rollout(template, iteration) == saved
        assert [p.name for p in Path(folder, "new").iterdir()] == [f"rollout_{iteration}.jsonl"]


def test_files_saved_before_the_renaming_still_load(tmp_path):
    template = str(tmp_path / "{iteration}.jsonl")
    group = scored_group(0, [[(2, 1.0)]], 7)
    save_rollout(template, 3, [group])
    path = tmp_path / "3.jsonl"
    path.write_text(path.read_text().replace('"trajectory_id"', '"rollout_id"'))
    assert load_rollout(template, 3) == [group]


@pytest.fixture
def saved(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    save_rollout(template, 0, [scored_group(i, [[(2, 1.0)]], i) for i in range(2)])
    return template, tmp_path / "0.jsonl"


def test_a_missing_file_names_the_flag(saved):
    template, _ = saved
    with pytest.raises(ValueError, match=r"--load-debug-rollout-data \S+: cannot read \S+/7.jsonl for iteration 7"):
        load_rollout(template, 7)


def test_an_empty_file_names_the_flag(saved):
    template, path = saved
    path.write_text("\n")
    with pytest.raises(ValueError, match=r"--load-debug-rollout-data \S+: \S+ holds no groups"):
        load_rollout(template, 0)


def break_status(record):
    record["samples"][0]["status"] = "lost"


def drop_mask(record):
    del record["samples"][0]["loss_mask"]


def shorten_mask(record):
    record["samples"][0]["loss_mask"].pop()


def drop_prompt(record):
    del record["prompt"]


def break_samples(record):
    record["samples"] = [3]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (break_status, "'lost' is not a valid SampleStatus"),
        (drop_mask, "lacks 'loss_mask'"),
        (shorten_mask, "loss_mask has 2 entries for 3 response tokens"),
        (drop_prompt, "lacks 'prompt'"),
        (break_samples, "int"),
    ],
)
def test_a_malformed_line_is_named(saved, spoil, fault):
    template, path = saved
    first, second = path.read_text().splitlines()
    record = json.loads(second)
    spoil(record)
    path.write_text(f"{first}\n{json.dumps(record)}\n")
    with pytest.raises(ValueError, match=rf"0\.jsonl:2: not a group .*{fault}"):
        load_rollout(template, 0)


@pytest.mark.parametrize("line", [b"{", b"[1]", b"3", b"\xff\xfe\xff"])
def test_a_line_that_is_no_object_is_named(saved, line):
    template, path = saved
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"0\.jsonl:1: not a group"):
        load_rollout(template, 0)


def test_what_json_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    group = scored_group(0, [[(1, 1.0)]], 0)
    odd = PromptGroup(0, replace(group.prompt, label={1, 2}), [])
    with pytest.raises(ValueError, match=r"--save-debug-rollout-data: .*set\.jsonl:1 cannot be written as JSON"):
        save_rollout(str(tmp_path / "x.jsonl"), 0, [group, odd])
    assert list(tmp_path.iterdir()) == []
