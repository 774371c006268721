"""The loss contract in the JSON of a rehearsal equals a run's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rehearsed_layouts import FSDP, MEGATRON

from miles.commands.rehearsal.trace import contract_data, contract_text
from miles.objective.aggregation import MODES
from miles.objective.settings import LossArguments

RESPONSE, TRAJECTORIES = 96, 8
DIVIDED = dict(loss_aggregation_divisor=48.0)


@pytest.mark.parametrize(
    ("loss", "mass", "denominator"),
    [
        ({}, 1.0, RESPONSE),
        ({"loss_aggregation": "prompt_mean"}, 1.0, RESPONSE),  # 192 tokens of a group, 4 prompts of 8 trajectories
        ({"loss_aggregation": "token_mean"}, 1.0, RESPONSE),
        ({"loss_aggregation": "constant", **DIVIDED}, 2.0, 48),
        ({"loss_aggregation": "delta_l", **DIVIDED}, 2.0, 48),
    ],
)
def test_denominators_and_mass_are_those_of_a_step_without_masked_tokens(tmp_path, loss, mass, denominator):
    settings = replace(FSDP["fsdp, 1 rank"].settings(tmp_path), loss=LossArguments(**loss))
    contract = json.loads(json.dumps(contract_data(settings)))
    assert contract["aggregation"] == settings.loss.loss_aggregation and contract["trajectories"] == TRAJECTORIES
    denominators = contract["denominators"]
    assert denominators["of_a_sample"] == MODES[settings.loss.loss_aggregation].denominator
    assert denominators["of_a_sample_without_masked_tokens"] == pytest.approx(denominator)
    assert (denominators["prompts"], denominators["loss_tokens"]) == (4, TRAJECTORIES * RESPONSE)
    assert denominators["weight_of_a_token"] * denominators["loss_tokens"] == pytest.approx(mass)
    assert contract["expected_mass"] == pytest.approx(mass)
    text = "\n".join(contract_text(settings))
    assert f"must add up to {mass:g}" in text and "divided by" in text


def test_nothing_is_said_about_a_reducer_of_the_user(tmp_path):
    loss = LossArguments(custom_pg_loss_reducer_function_path="mine:reduce")
    settings = replace(FSDP["fsdp, 1 rank"].settings(tmp_path), loss=loss)
    contract = contract_data(settings)
    assert contract["denominators"] is None and contract["expected_mass"] is None
    assert not [line for line in contract_text(settings) if line.startswith(("canary", "divided by"))]


def test_groups_of_ranks_are_those_of_the_layout(tmp_path):
    settings = MEGATRON["megatron, TP 2, CP 2"].settings(tmp_path)
    ranks = json.loads(json.dumps(contract_data(settings)["ranks"]))
    assert ranks == {
        "same_tokens_other_weights": [[0, 1], [2, 3]],
        "share_each_sequence": [[0, 2], [1, 3]],
        "context_parallel_sizes": [2],
        "same_weights_other_tokens": [[0, 2], [1, 3]],
    }
    text = "\n".join(contract_text(settings))
    assert "0 1 | 2 3" in text and "0 2 | 1 3" in text


def test_no_group_shares_every_sequence_if_micro_batches_choose(tmp_path):
    settings = FSDP["fsdp, DP 2, CP 2"].settings(tmp_path)
    parallel = replace(settings.parallel, context_parallel_size=1, dynamic_context_parallel=True)
    ranks = contract_data(replace(settings, parallel=parallel))["ranks"]
    assert ranks["share_each_sequence"] is None and ranks["context_parallel_sizes"] == (1, 2, 4)
