"""ReMax: the baseline is the reward of a greedy response, which is generated, scored and not trained on."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
from scored_groups import scored_group

from miles.batch.convert import convert
from miles.engine.base import FinishReason, Generation, SamplingParams
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.settings import LossArguments
from miles.rollout.groups import GroupSpec, GroupTools, generate_group, produce_group, response_seed
from miles.rollout.metrics import rollout_metrics
from miles.types.sample import Prompt, PromptGroup

REMAX = LossArguments(advantage_estimator="remax")


def test_the_greedy_reward_is_subtracted_also_in_a_group_of_one():
    groups, numbers = [scored_group(0, [[(1, 1.0)], [(2, 0.25)]], 0), scored_group(1, [[(3, 1.0)]], 2)], count()
    for group in groups:
        group.baseline_reward = 0.25 + next(numbers)
    [step] = convert(groups, loss=REMAX, global_batch_size=3)
    assert step.rewards == [0.75, 0.0, -0.25]
    assert build_objective(REMAX).samples_with_gradient(step.rewards) == [True, False, True]


def test_without_the_greedy_response_the_run_stops():
    with pytest.raises(ValueError, match="--advantage-estimator remax: a prompt group has no baseline_reward"):
        build_objective(REMAX).sample_advantages(SampleRewards([1.0], [0], [0]))
    with pytest.raises(ValueError, match="has no baseline_reward"):
        convert([scored_group(0, [[(1, 1.0)]], 0)], loss=REMAX, global_batch_size=1)


class Engine:
    """Answers with as many tokens as its temperature states."""

    def __init__(self) -> None:
        self.sampling: list[SamplingParams] = []

    async def generate(self, request):
        self.sampling.append(request.sampling)
        length = 1 if request.sampling.temperature == 0 else 3
        finish: FinishReason = "stop"
        return [Generation([7] * length, [-0.5] * length, finish, [0] * length) for _ in request.seeds]


class Words:
    def decode(self, ids, *, skip_special_tokens):
        return "x" * len(ids)


async def length(samples):
    return [float(len(sample.response_ids)) for sample in samples]


def fails(sample, trajectories):
    return len(sample.response_ids) == 1 or sample.trajectory_id in trajectories  # the greedy response has one token


def spec(**more):
    return GroupSpec(SamplingParams(8, 0.7, 0.9, 5), 4, partial(response_seed, 1), greedy_baseline=True, **more)


async def test_one_more_request_per_prompt_is_generated_at_temperature_0():
    engine, drawn = Engine(), PromptGroup(3, Prompt("p", (1, 2)))
    made = await produce_group(drawn, GroupTools(engine, Words(), generate_group, length), spec())
    assert [s.temperature for s in engine.sampling] == [0.7, 0.0]
    assert (engine.sampling[1].top_p, engine.sampling[1].top_k) == (1.0, -1)
    assert made.group.baseline_reward == 1.0 and [s.reward for s in made.group.samples] == [3.0] * 4
    assert [s.trajectory_id for s in made.group.samples] == [12, 13, 14, 15]
    assert rollout_metrics([made.group], [made.group], 0, False)["rollout/tokens"].value == 4 * 3 + 1


@pytest.mark.parametrize("failing", [set(), {1, 2}, {0, 1, 2, 3}])
async def test_a_group_whose_greedy_response_has_no_reward_is_dropped(failing):
    """Also if answers failed with it: metrics read the rewards of the others."""

    async def reward(samples):
        return [float("nan") if fails(sample, failing) else 1.0 for sample in samples]

    tools = GroupTools(Engine(), Words(), generate_group, reward, drops_reward_errors=True)
    made = await produce_group(PromptGroup(0, Prompt("p", (1,))), tools, spec())
    assert made.drop_reason == "reward_error" and made.reward_errors == 1 + len(failing)
    metrics = rollout_metrics([], [made.group], made.reward_errors, log_passrate=True)
    assert metrics["rollout/tokens"].value == 3 * (4 - len(failing)) + 1


def test_only_this_estimator_has_it_generated():
    assert REMAX.reads_greedy_baseline
    assert not LossArguments().reads_greedy_baseline
