"""Mixtures and curricula in the whole rollout side: a tiny model, the embedded engine, real prompts and rewards."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.config.cluster import ClusterArguments
from miles.config.model import ModelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.config.validate import validate
from miles.rollout.ordering import Start
from miles.rollout.pipeline import build_pipeline
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.stream import Curriculum
from miles.tasks.rewards.settings import RewardArguments
from miles.types.weights import WeightChunk

torch.set_num_threads(1)


@pytest.fixture
def settings(tiny_model, tmp_path):
    words = []
    for name, size in (("sums", 5), ("words", 3)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{name} {i}", "label": str(i)}) + "\n" for i in range(size)))
        words += [name, str(path)]
    flags = Settings(
        model=ModelArguments(hf_checkpoint=str(tiny_model)),
        data=DataArguments(
            prompt_mix=tuple(words), prompt_mix_weights=(3.0, 1.0), input_key="prompt", rollout_shuffle=True
        ),
        reward=RewardArguments(rm_type="length"),
        rollout=RolloutArguments(
            num_rollout=4, rollout_batch_size=4, n_samples_per_prompt=2, rollout_max_response_len=6
        ),
        training=TrainingArguments(global_batch_size=8),
        cluster=ClusterArguments(actor_num_gpus_per_node=1),
    )
    return validate(flags).settings


@pytest.fixture
def weights(tiny_model):
    return [WeightChunk(dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters()))]


async def run(settings, weights, iterations, state=None):
    """Return the groups and metrics of each iteration, and the checkpoint's position before it."""
    pipeline = await build_pipeline(settings, SimpleNamespace(device="cpu"))
    if state is not None:
        pipeline.restore(json.loads(json.dumps(state)))
    history = []
    for iteration in iterations:
        await pipeline.update_weights(weights, iteration, None)
        async with pipeline.collecting(Start(iteration, None, iteration)) as collected:
            history.append((collected.scored, pipeline.state(iteration)))
    await pipeline.producer.close()
    return history


def answers(history):
    return [[(g.group_index, g.prompt.text, [s.response_ids for s in g.samples]) for g in s.groups] for s, _ in history]


def from_sums_to_words(curriculum: Curriculum):
    """Weights by the iteration, then the prompts of the shortest answers."""
    assert curriculum.num_iterations == 4
    assert all(known.groups >= 1 for known in curriculum.prompts.values())
    if curriculum.iteration < 2:
        return {"sums": 1.0 - curriculum.iteration, "words": float(curriculum.iteration)}
    return sorted(curriculum.prompts, key=lambda place: curriculum.prompts[place].reward)[:2]


async def test_metrics_are_those_of_each_set(settings, weights):
    [(scored, _), *_] = await run(settings, weights, [0])
    by_set = {name: [g for g in scored.groups if g.prompt.prompt_set == name] for name in ("sums", "words")}
    assert {name: len(groups) for name, groups in by_set.items()} == {"sums": 3, "words": 1}
    for name, groups in by_set.items():
        rewards = [sample.reward for group in groups for sample in group.samples]
        lengths = [len(sample.response_ids) for group in groups for sample in group.samples]
        assert scored.metrics[f"rollout/prompts/{name}"].value == len(groups)
        assert scored.metrics[f"rollout/reward/{name}"].value == pytest.approx(sum(rewards) / len(rewards))
        assert scored.metrics[f"rollout/response_length/{name}"].value == pytest.approx(sum(lengths) / len(lengths))
    assert scored.metrics["rollout/prompt_weight/sums"].value == 3.0


@pytest.mark.parametrize("path", [None, f"{__name__}:from_sums_to_words"])
async def test_a_resumed_run_draws_and_generates_the_same(settings, weights, path):
    settings = replace(settings, data=replace(settings.data, curriculum_path=path))
    whole = await run(settings, weights, range(4))
    for stop in (1, 3):
        resumed = await run(settings, weights, range(stop, 4), whole[stop][1])
        assert answers(resumed) == answers(whole)[stop:]
        assert [state for _, state in resumed] == [state for _, state in whole[stop:]]
    if path is not None:
        sets = [{group.prompt.prompt_set for group in scored.groups} for scored, _ in whole[:2]]
        assert sets == [{"sums"}, {"words"}]
        assert whole[1][0].metrics["rollout/prompt_weight/sums"].value == 0.0
