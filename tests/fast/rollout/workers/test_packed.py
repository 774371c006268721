"""Groups and errors on their way from a generation worker arrive as they were."""

import pickle

import numpy as np
import pytest

from miles.base.text import InputError
from miles.rollout.groups import ProducedGroup
from miles.rollout.workers.messages import decode_error, encode, encode_error, pack, unpack
from miles.rollout.workers.worker import share
from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus

PROMPT = Prompt("2*3=", (1, 2, 3), label="6", metadata={"row": 1}, source="sums.jsonl:1")


def sent(produced):
    return unpack(pickle.loads(pickle.dumps(pack(produced, PROMPT))), PROMPT)


def test_a_group_arrives_as_it_was():
    samples = [
        Sample(PROMPT, 7, 14, [5, 6], "56", [1, 1], [-0.1, -1e-300], SampleStatus.COMPLETED, weight_versions=[3, 4]),
        Sample(PROMPT, 7, 15, [9, 9, 9], "999", [1, 0, 1], [-1.0, 0.0, -2.5], reward=0.5, weight_versions=[3, -1, 3]),
        Sample(PROMPT, 7, 15, status=SampleStatus.ABORTED, teacher_log_probs=[]),
    ]
    samples[0].reward_parts, samples[1].made_by = {"math": 1.0}, "a function of the user's"
    samples[1].experts = np.ones((5, 2, 1), np.int8)
    group = PromptGroup(7, PROMPT, samples, dropped_trajectories=1, baseline_reward=0.25, baseline_tokens=12)
    result = sent(ProducedGroup(group, 2, "reward_error"))
    assert result == ProducedGroup(group, 2, "reward_error")
    assert all(sample.prompt is PROMPT for sample in result.group.samples), "this process's own"
    assert result.group.samples[1].made_by == "a function of the user's"
    assert np.array_equal(result.group.samples[1].experts, samples[1].experts)


@pytest.mark.parametrize("column", [[2**70, 1], ["a"], [1.5, 2], (1, 1), [], None], ids=repr)
def test_columns_that_are_no_numbers_of_the_usual_size_arrive_too(column):
    sample = Sample(PROMPT, 0, 0, response_ids=column)
    [result] = sent(ProducedGroup(PromptGroup(0, PROMPT, [sample]))).group.samples
    assert result.response_ids == column and type(result.response_ids) is type(column)


def test_a_sample_of_another_prompt_or_class_keeps_them():
    class Own(Sample):
        pass

    samples = [Sample(Prompt("other", (4,)), 0, 0, [1]), Own(PROMPT, 0, 1, [2])]
    packed = pack(ProducedGroup(PromptGroup(0, PROMPT, samples)), PROMPT)
    assert unpack(packed, PROMPT).group.samples == samples


class NeedsTwo(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (InputError("--flag 1: wrong; give 2"), InputError, "--flag 1: wrong; give 2"),
        (NeedsTwo(1, 2), RuntimeError, "NeedsTwo: 1 and 2"),
    ],
)
def test_an_error_arrives_with_its_type_if_that_can_be_sent(error, kind, words):
    result = decode_error(encode_error(error, "generation worker 3"))
    assert type(result) is kind and str(result) == words
    assert result.__notes__[0].startswith("in generation worker 3:")


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ValueError, match=r"group 7 \(a\.jsonl:8\) holds something that cannot be sent .*; keep plain"):
        encode({"open": lambda: None}, "group 7 (a.jsonl:8)")


@pytest.mark.parametrize(("total", "count"), [(10, 4), (3, 8), (8, 8)])
def test_shares_add_up(total, count):
    assert sum(share(total, count, number) for number in range(count)) == total
