"""Environments in the whole rollout side, from prompts without labels to shards, without Ray."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.batch.schedule import ShardBuilder
from miles.commands.saved_runs.generation import answer, evaluate_sets
from miles.config.parser import parse
from miles.config.validate import validate
from miles.rollout.ordering import Start
from miles.rollout.pipeline import build_pipeline
from miles.tasks.environments.base import Environment, opening
from miles.types.weights import WeightChunk

torch.set_num_threads(1)


class Twice(Environment):
    """Asks a second time, and pays the row's reward."""

    max_tokens = 4

    def __init__(self, prompt):
        self.prompt, self.answers = prompt, []

    async def reset(self):
        return opening(self.prompt)

    async def step(self, answer):
        self.answers.append(answer["content"])
        return [] if len(self.answers) == 2 else [{"role": "user", "content": "7"}]

    async def reward(self):
        return self.prompt.metadata.get("pays", 0.0)


@pytest.fixture
def settings(tiny_model, tmp_path):
    rows = [{"prompt": f"{i} + {i}", "metadata": {"pays": i / 4}} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(*flags):
        data = str(tmp_path / "sums.jsonl")
        words = f"--hf-checkpoint {tiny_model} --prompt-data {data} --input-key prompt --environment {__name__}:Twice"
        words += (
            " --rm-type environment:2,length:-0.001 --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 2"
        )
        words += " --rollout-max-response-len 60 --rollout-max-context-len 120 --apply-chat-template"
        words += f" --global-batch-size 2 --actor-num-gpus-per-node 1 --device cpu --eval-prompt-data held {data}"
        words += " --rollout-engine torch --train-backend fsdp --eval-interval 1"
        return validate(parse([*words.split(), *flags])).settings

    return of


@pytest.mark.parametrize("mode", [[], ["--partial-rollout", "--over-sampling-batch-size", "4"]])
async def test_trajectories_of_environments_become_shards(settings, tiny_model, mode):
    flags = settings(*mode)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    weights = [WeightChunk(dict(model.named_parameters()))]
    pipeline = await build_pipeline(flags, SimpleNamespace(device="cpu"))
    for iteration in range(2):
        await pipeline.update_weights(weights, iteration, iteration - 1 if iteration else None)
        async with pipeline.collecting(Start(iteration, iteration - 1 if iteration else None, iteration)) as collected:
            groups = collected.scored.groups
            [shards] = ShardBuilder(flags).build(iteration, groups)
        for sample in [sample for group in groups for sample in group.samples]:
            assert 0 in sample.loss_mask and 1 in sample.loss_mask
            assert sample.reward_parts["environment"] == sample.metadata["pays"]
            assert sample.reward == pytest.approx(2 * sample.metadata["pays"] + 0.001 * len(sample.response_ids))
        assert [len(shard.batch.trajectory_ids) for shard in shards] == [2, 2]
    if not mode:
        assert (await pipeline.evaluate())["eval/held/reward_parts/environment"].value == pytest.approx(0.25)
    await pipeline.producer.close()


async def test_the_weights_of_a_run_are_evaluated_and_sampled_in_its_environment(settings):
    flags = settings()
    [held] = await evaluate_sets(flags, (), 1)
    assert {s.reward_parts["environment"] for s in held.samples} == {0.0, 0.25, 0.5}
    samples = await answer(flags, "3 + 4", 2, 1, None, None)
    assert len(samples) == 2 and all(0 in s.loss_mask for s in samples)
