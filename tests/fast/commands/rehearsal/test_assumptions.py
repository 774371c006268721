"""The samples that a rehearsal assumes are those that the converter of a run makes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch.distributed as dist
from rehearsed_layouts import MEGATRON, save_models

from miles.batch.convert import convert
from miles.commands.rehearsal.trace import _batch, trace_rank
from miles.config.validate import validate
from miles.objective.settings import LossArguments
from miles.types.sample import Prompt, PromptGroup, Sample


@pytest.mark.parametrize("loss", [{}, dict(use_opd=True, opd_type="server"), dict(advantage_estimator="ppo")])
def test_long_responses_are_converted_as_in_a_run(loss):
    prompts = [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    groups, numbers = [], [(0, 1), (2, 3), (4,)]
    for index, (ids, members) in enumerate(zip(prompts, numbers, strict=True)):
        made = [
            Sample(
                Prompt("", ids),
                index,
                i,
                [i % 2, 0, 0, 0, 0],
                "",
                [1] * 5,
                [0.0] * 5,
                teacher_log_probs=[0.0] * 5,
                reward=float(i % 2),
            )
            for i in members
        ]
        groups.append(PromptGroup(index, made[0].prompt, made, baseline_reward=0.5))
    (expected,) = convert(groups, loss=LossArguments(**loss), global_batch_size=5)
    batch = _batch(5, 2, 3, 5, LossArguments(**loss))
    for name in (field.name for field in fields(expected)):
        np.testing.assert_equal(getattr(batch, name), getattr(expected, name), err_msg=name)


def test_many_samples_differ_in_their_first_tokens():
    batch = _batch(600, 300, 2, 4, LossArguments())
    assert [*batch.tokens[299]] == [0, 0, 11, 2, 1, 0]  # 299 is 0x12b
    assert [*batch.tokens[300]] == [1, 0, 0, 0, 0, 0]
    assert len({tokens.tobytes() for tokens in batch.tokens}) == 600


@pytest.mark.slow
def test_a_rank_of_megatron_creates_its_own_process_groups_only(tmp_path, monkeypatch):
    save_models(tmp_path, weights=False)
    settings = validate(MEGATRON["megatron, TP 2, PP 2"].settings(tmp_path)).settings
    created, create = [], dist.new_group

    def noted(ranks=None, *arguments, **named):
        created.append(ranks)
        return create(ranks, *arguments, **named)

    monkeypatch.setattr(dist, "new_group", noted)
    trace = trace_rank(settings, 2)
    assert created and all(ranks is None or 2 in ranks for ranks in created)
    sent = {message.ranks for tally in trace.tallies.values() for message in tally.messages}
    assert {(2, 3), (0, 2)} <= sent, "tensor and pipeline parallel"
