import json
import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scored_groups import scored_group

from miles.base.disk_faults import WriteFailed
from miles.base.text import InputError
from miles.rollout.debug_data import load_rollout, save_rollout
from miles.types.replay import TokenSets
from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LOG_PROBS = st.floats(max_value=1e-4, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # line separators too
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
PROMPTS = st.builds(
    Prompt,
    text=TEXT,
    token_ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=4).map(tuple),
    label=JSON_VALUES,
    metadata=st.dictionaries(TEXT, JSON_VALUES, max_size=2),
    source=TEXT,
)


@st.composite
def supports(draw, response_ids):
    """Draw no support, or sets in both forms with the tokens of the response."""
    if draw(st.booleans()):
        return None
    others = st.none() | st.sets(st.integers(0, 99), max_size=12)
    drawn = [draw(others) for _ in response_ids]
    pairs = zip(drawn, response_ids, strict=True)
    return TokenSets.of(100, [None if one is None else sorted({*one, token}) for one, token in pairs])


@st.composite
def groups(draw):
    group = PromptGroup(draw(st.integers(0, 10**9)), draw(PROMPTS))
    for k in range(draw(st.integers(1, 3))):
        n = draw(st.integers(0, 3))
        response_ids = draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))
        group.samples.append(
            Sample(
                prompt=draw(st.just(group.prompt) | PROMPTS),
                group_index=group.group_index,
                trajectory_id=group.group_index * 3 + k,
                response_ids=response_ids,
                support=draw(supports(response_ids)),
                response=draw(TEXT),
                loss_mask=draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
                rollout_log_probs=draw(st.lists(LOG_PROBS, min_size=n, max_size=n)),
                teacher_log_probs=draw(st.just([]) | st.lists(LOG_PROBS, min_size=n, max_size=n)),
                status=draw(st.sampled_from(SampleStatus)),
                reward=draw(FLOATS),
                weight_versions=draw(st.lists(st.integers(-1, 2**40), min_size=n, max_size=n)),
                reward_parts=draw(st.dictionaries(TEXT, FLOATS, max_size=2)),
            )
        )
    group.dropped_trajectories = draw(st.integers(0, 2))
    group.baseline_reward = draw(st.none() | FLOATS)
    group.baseline_tokens = 0 if group.baseline_reward is None else draw(st.integers(0, 9))
    return group


@given(st.lists(groups(), min_size=1, max_size=3, unique_by=lambda group: group.group_index), st.integers(0, 99))
def test_saved_groups_are_restored_exactly(saved, iteration):
    with tempfile.TemporaryDirectory() as folder:
        template = f"{folder}/new/rollout_{{rollout_id}}.jsonl"
        save_rollout(template, iteration, saved)
        assert load_rollout(template, iteration) == saved
        assert [p.name for p in Path(folder, "new").iterdir()] == [f"rollout_{iteration}.jsonl"]


def test_a_full_disk_is_named_and_nothing_half_written_is_left(tmp_path):
    (tmp_path / "0.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(WriteFailed, match=r"0.jsonl was not written, because the disk .* is full"):
        save_rollout(str(tmp_path / "{iteration}.jsonl"), 0, [scored_group(0, [[(2, 1.0)]], 0)])
    assert list(tmp_path.iterdir()) == []


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


def put(record, **values):
    record["samples"][0].update(values)


SUPPORT = {"vocab_size": 100, "sizes": [-1, 1, -1], "ids": [5], "bits": ""}  # of three tokens


def break_samples(record):
    record["samples"] = [3]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (break_status, "'lost' is not a valid SampleStatus"),
        (drop_mask, "lacks 'loss_mask'"),
        (shorten_mask, "loss_mask has 2 entries for 3 response tokens"),
        (drop_prompt, "lacks 'prompt'"),
        (break_samples, "sample 1: it is of type int, not an object"),
        *(
            (partial(put, **change), fault)
            for change, fault in [
                ({"reward": math.nan}, "sample 1: reward has NaN, not a finite number"),
                ({"reward": None}, "sample 1: reward has null"),
                ({"reward": "1"}, "reward has .*, not a finite number"),
                ({"reward": True}, "reward has true, not a finite number"),
                ({"loss_mask": [1, 2, 1]}, "loss_mask has 2, not an integer from 0 to 1"),
                ({"loss_mask": [1, True, 1]}, "loss_mask has true"),
                ({"response_ids": [1, -1, 1]}, "response_ids has -1, not an integer from 0 to 99"),
                ({"response_ids": [1, 100, 1]}, "response_ids has 100, not an integer from 0 to 99"),
                ({"response_ids": [1, 1.0, 1]}, "response_ids has 1.0"),
                ({"response_ids": "abc"}, "response_ids is of type str, not a list"),
                ({"rollout_log_probs": [0, -math.inf, 0]}, "rollout_log_probs has -Infinity"),
                ({"rollout_log_probs": [0, 5.0, 0]}, "rollout_log_probs has 5, and the logarithm of a probability is"),
                ({"rollout_log_probs": [0, -(10**400), 0]}, "rollout_log_probs has -1000.*, not a finite number"),
                ({"teacher_log_probs": [0, 0.1, 0]}, "teacher_log_probs has 0.1, and the logarithm"),
                ({"reward": 10**400}, "reward has 1000.*, not a finite number"),
                ({"reward_parts": {"a": 10**400}}, "reward_parts has 1000.*, not a finite number"),
                ({"rewards": 1.0}, "sample 1: it has 'rewards', which is not read; did you mean reward"),
                ({"rollout_id": 1}, "sample 1: it has 'rollout_id', which is not read"),
                ({"weight_versions": [-2, 0, 0]}, "weight_versions has -2"),
                ({"response": 3}, "response is of type int, not text"),
                ({"trajectory_id": None}, "trajectory_id has null"),
                ({"trajectory_id": 0}, "trajectory_id 0 is in line 1 too"),
                ({"status": []}, "is not a valid SampleStatus"),
                ({"prompt": 3}, "prompt is of type int, not an object"),
                ({"support": []}, "support is of type list, not an object"),
                ({"support": SUPPORT | {"vocab_size": 50}}, "vocab_size of support is 50, and the model's is 100"),
                ({"support": SUPPORT | {"sizes": [-1, -2, -1]}}, "sizes of support has -2"),
                ({"support": SUPPORT | {"sizes": [-1, 2, -1]}}, "sizes of the sets do not fit their ids"),
                ({"support": SUPPORT | {"sizes": [-1, -1], "ids": []}}, "support has 2 entries for 3 response tokens"),
                ({"support": SUPPORT | {"ids": [100]}}, "ids of support has 100"),
                ({"support": SUPPORT | {"ids": [99]}}, "support lacks a response token"),
                ({"support": SUPPORT | {"bits": "x"}}, "sample 1: "),
                ({"support": SUPPORT | {"bits": "AAAA"}}, "bits of support are 3 bytes, not a multiple of 13"),
            ]
        ),
        (lambda record: record.update(group_index=0), "group_index 0 is in line 1 too"),
        (lambda record: record.update(group_index=True), "group_index has true"),
        (lambda record: record.update(samples=[]), "it has no samples"),
        (lambda record: record["prompt"].update(token_ids=[]), "token_ids of the prompt is empty"),
        (lambda record: record["prompt"].update(label=math.nan), "label of the prompt has NaN or Infinity"),
        (lambda record: record["prompt"].update(label=[-math.inf]), "label of the prompt has NaN or Infinity"),
        (lambda record: record["prompt"].update(labels="x"), "the prompt has 'labels', which is not read; did you"),
        (lambda record: record.update(baseline_rewards=1.0), "the group has 'baseline_rewards', which is not read"),
        (lambda record: record.update(baseline_reward=10**400), "baseline_reward has 1000.*, not a finite number"),
        (lambda record: record["prompt"].update(metadata=[]), "metadata of the prompt is of type list"),
    ],
)
def test_a_malformed_line_is_named(saved, spoil, fault):
    template, path = saved
    first, second = path.read_text().splitlines()
    record = json.loads(second)
    spoil(record)
    path.write_text(f"{first}\n{json.dumps(record)}\n")
    with pytest.raises(InputError, match=rf"0\.jsonl:2: not a group .*{fault}"):
        load_rollout(template, 0, vocab_size=100)


@pytest.mark.parametrize(
    "line",
    [b"{", b"[1]", b"3", b"\xff\xfe\xff", b"[" * 10**5, b"9" * 6000, b'{"group_index": 1, "group_index": 2}'],
)
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


def test_a_file_name_that_is_too_long():
    with pytest.raises(InputError, match=r"--load-debug-rollout-data a+…; save it first") as caught:
        load_rollout("a" * 10_000, 0)
    assert len(str(caught.value)) < 1000


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def positions(record):
    """Return every place in a record, as the container and the key."""
    pairs = []
    for key in record if isinstance(record, dict) else range(len(record)):
        pairs.append((record, key))
        if isinstance(record[key], dict | list):
            pairs += positions(record[key])
    return pairs


def check_any_file(tmp_path, changes, cut):
    template = str(tmp_path / "{rollout_id}.jsonl")
    save_rollout(template, 0, [scored_group(i, [[(2, 1.0)]], i) for i in range(2)])
    path = tmp_path / "0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for place, value in changes:
        options = positions(records)
        container, key = options[place % len(options)]
        container[key] = value
    content = "\n".join(map(json.dumps, records)).encode()
    path.write_bytes(content[: len(content) - cut])
    try:
        groups = load_rollout(template, 0, vocab_size=1000)
    except InputError as error:
        assert "0.jsonl" in str(error) and str(error).isprintable() and len(str(error)) < 1000
        return
    for group in groups:
        assert all(math.isfinite(reward) for reward in group.rewards)
        for sample in group.samples:
            sample.check()
            assert all(0 <= token < 1000 for token in sample.tokens)


any_file = given(changes=st.lists(st.tuples(st.integers(0, 10**6), ANY), max_size=2), cut=st.integers(0, 3))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@any_file
def test_any_file(tmp_path, changes, cut):
    check_any_file(tmp_path, changes, cut)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@any_file
def test_any_file_for_long(tmp_path, changes, cut):
    check_any_file(tmp_path, changes, cut)
