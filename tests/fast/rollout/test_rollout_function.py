"""``--rollout-function-path``: the user's function replaces the collector."""

import re

import pytest

from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.rollout import hooks
from miles.rollout.collect import Rollout
from miles.rollout.groups import GroupTools, generate_group
from miles.rollout.pipeline import build_collector
from miles.types.metrics import Metric

PATH = "miles.rollout.hooks:mine"


async def ones(samples):
    return [1.0 for _ in samples]


@pytest.fixture
def collect(scripted_engine, counting_stream, tokenizer, monkeypatch):
    async def run(function):
        monkeypatch.setattr(hooks, "mine", function, raising=False)
        rollout = RolloutArguments(
            rollout_batch_size=2, n_samples_per_prompt=3, rollout_max_response_len=8, rollout_function_path=PATH
        )
        tools = GroupTools(scripted_engine(), tokenizer, generate_group, ones)
        settings = Settings(rollout=rollout)
        return await build_collector(settings, counting_stream(9), tools, num_iterations=5).collect(4)

    return run


async def hardest_first(iteration, tools):
    """Draws three, trains on the two with the longest prompts."""
    made = [await tools.make_group(drawn) for drawn in tools.stream.draw(3)]
    return sorted((m.group for m in made), key=lambda group: len(group.prompt.token_ids))[1:]


async def test_its_groups_are_the_iteration(collect):
    collected = await collect(hardest_first)
    assert [group.group_index for group in collected.groups] == [1, 2]
    assert collected.metrics["rollout/reward"].value == 1.0


async def test_it_may_return_metrics(collect):
    async def with_metrics(iteration, tools):
        groups = await hardest_first(iteration, tools)
        return Rollout(groups, {"rollout/mine": Metric(iteration)}, groups[:1])

    result = await collect(with_metrics)
    assert result.generated == result.groups[:1]
    metrics = result.metrics
    assert (metrics["rollout/mine"].value, metrics["rollout/reward"].value) == (4, 1.0)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda groups: None, "is None; return a list"),
        (lambda groups: groups[:1], "has 1 groups; return as many as --rollout-batch-size 2"),
        (lambda groups: [g.samples.pop() and g for g in groups], "give it --n-samples-per-prompt 3 trajectories"),
        (lambda groups: [setattr(g.samples[0], "reward", None) or g for g in groups], "without a reward"),
    ],
)
async def test_wrong_groups_are_refused(collect, change, fault):
    async def wrong(iteration, tools):
        return change(await hardest_first(iteration, tools))

    with pytest.raises(ValueError, match=re.escape(f"--rollout-function-path {PATH}: iteration 4") + ".*" + fault):
        await collect(wrong)
