"""The whole rollout side in one process, without Ray: a tiny model, the embedded engine, real prompts and rewards."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scored_groups import scored_group
from transformers import AutoModelForCausalLM

from miles.base.text import InputError
from miles.base.user_code import UserCodeError
from miles.batch.schedule import ShardBuilder
from miles.config.cluster import ClusterArguments
from miles.config.evaluation import EvaluationArguments
from miles.config.model import ModelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.config.validate import validate
from miles.objective.settings import LossArguments
from miles.rollout import hooks, producer
from miles.rollout import pipeline as pipelines
from miles.rollout.debug_data import load_rollout
from miles.rollout.filters import FilterDecision
from miles.rollout.groups import GroupSpec, produce_group
from miles.rollout.ordering import Start
from miles.rollout.pipeline import build_pipeline
from miles.tasks.data.custom_source import CustomStream
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Prompt
from miles.types.weights import WeightChunk

torch.set_num_threads(1)
PROMPTS = 5  # in the set: the third iteration of two prompts starts the second pass


@pytest.fixture
def settings(tiny_model, tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{i} + {i} = ", "label": str(2 * i)} for i in range(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(**rollout):
        rollout = {"num_rollout": 3, "rollout_batch_size": 2, "n_samples_per_prompt": 2} | rollout
        flags = Settings(
            model=ModelArguments(hf_checkpoint=str(tiny_model)),
            data=DataArguments(prompt_data=str(path), input_key="prompt", rollout_shuffle=True),
            reward=RewardArguments(rm_type="length"),
            rollout=RolloutArguments(rollout_max_response_len=6, **rollout),
            evaluation=EvaluationArguments(eval_prompt_data=("held", str(path)), eval_interval=1),
            training=TrainingArguments(global_batch_size=2),
            cluster=ClusterArguments(actor_num_gpus_per_node=1),
        )
        return validate(flags).settings

    return of


@pytest.fixture
def weights(tiny_model):
    return [WeightChunk(dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters()))]


async def build(settings):
    return await build_pipeline(settings, SimpleNamespace(device="cpu"))


async def collect(pipeline, weights, iteration, after=None):
    """Load the weights of the iteration, then collect it."""
    await pipeline.update_weights(weights, iteration, after)
    async with pipeline.collecting(Start(iteration, after, iteration)) as collected:
        return collected


async def test_iterations_end_at_scored_groups(settings, weights):
    pipeline = await build(settings())
    assert pipeline.num_iterations == 3
    results = [await collect(pipeline, weights, i, i - 1 if i else None) for i in range(3)]
    groups = [group for collected in results for group in collected.scored.groups]
    assert [group.group_index for group in groups] == [0, 1, 2, 3, 4, 5]
    assert len({group.prompt.text for group in groups[:PROMPTS]}) == PROMPTS
    for iteration, collected in enumerate(results):
        assert collected.prompts_after["next_group_index"] == 2 * (iteration + 1)
        samples = [sample for group in collected.scored.groups for sample in group.samples]
        assert [s.trajectory_id for s in samples] == [4 * iteration + i for i in range(4)]
        for sample in samples:
            assert sample.reward is not None and set(sample.weight_versions) == {iteration}
        rewards = [sample.reward for sample in samples]
        assert collected.scored.metrics["rollout/reward"].value == pytest.approx(sum(rewards) / 4)


@pytest.mark.parametrize("which", ["prompt_data", "prompt_mix", "eval_prompt_data"])
async def test_a_label_that_the_reward_cannot_read_is_refused_before_the_engine_starts(settings, tmp_path, which):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1 + 1 = ", "label": " "}\n')
    flags = settings()
    if which == "prompt_data":
        flags = replace(flags, data=replace(flags.data, prompt_data=str(bad)))
    elif which == "prompt_mix":
        flags = replace(flags, data=replace(flags.data, prompt_data=None, prompt_mix=("a", str(bad))))
    else:
        flags = replace(flags, evaluation=replace(flags.evaluation, eval_prompt_data=("held", str(bad))))
    flags = replace(flags, reward=RewardArguments(rm_type="exact_match"))
    data = replace(flags.data, label_key="label")
    with pytest.raises(InputError, match=r"bad\.jsonl:1: --rm-type exact_match: the label of the row is ' '"):
        await build(replace(flags, data=data, evaluation=replace(flags.evaluation, eval_label_key="label")))


async def test_the_groups_become_shards_without_ray(settings, weights):
    flags = settings()
    collected = await collect(await build(flags), weights, 0)
    shards = ShardBuilder(flags).build(0, collected.scored.groups)
    assert [len(of_rank) for of_rank in shards] == [2]  # one token rank, two steps of two trajectories
    assert [shard.batch.trajectory_ids for shard in shards[0]] == [[0, 1], [2, 3]]
    assert [shard.expected_loss_mass is not None for shard in shards[0]] == [True, False]  # --loss-canary first


def test_saved_groups_of_another_size_are_one_dynamic_step_or_refused(settings):
    flags = settings(load_debug_rollout_data="saved_{iteration}.jsonl")
    groups = [scored_group(i, [[(3, 1.0)], [(2, 0.0)]], first_trajectory_id=2 * i) for i in range(3)]
    with pytest.raises(InputError, match="--load-debug-rollout-data saved_.* 1 has 6 trajectories, .* is 4;"):
        ShardBuilder(flags).build(1, groups)
    training = replace(flags.training, global_batch_size=None, use_dynamic_global_batch_size=True)
    flags = validate(replace(flags, training=training)).settings
    assert validate(flags).settings == flags
    [[shard]] = ShardBuilder(flags).build(1, groups)
    assert shard.batch.num_trajectories == 6


async def test_a_restored_pipeline_continues_as_if_it_had_never_stopped(settings, weights):
    pipeline = await build(settings())
    await collect(pipeline, weights, 0)
    state_before = pipeline.state(1)
    straight = await collect(pipeline, weights, 1, after=0)
    resumed = await build(settings())
    resumed.restore(json.loads(json.dumps(state_before)))
    assert (await collect(resumed, weights, 1)).scored == straight.scored
    assert pipeline.state(1) == state_before  # iteration 1 is complete, and not trained on yet


async def test_a_checkpoint_taken_while_later_iterations_are_collected_draws_them_again(settings, weights):
    pipeline = await build(settings(async_steps=1))
    await pipeline.update_weights(weights, 0)
    before = []
    for iteration in range(3):
        before.append(pipeline.state(iteration))
        after, version = (iteration - 1 if iteration else None), max(0, iteration - 1)
        if version:
            await pipeline.update_weights(weights, version, after)
        async with pipeline.collecting(Start(iteration, after, version)):
            pass
    assert [pipeline.state(iteration) for iteration in (1, 2)] == before[1:]
    assert [state["next_group_index"] for state in (*before, pipeline.state(3))] == [0, 2, 4, 6]


async def test_fully_async_collects_until_the_last_iteration(settings, weights):
    pipeline = await build(settings(async_steps=1, fully_async=True, num_rollout=4))
    results = [await collect(pipeline, weights, i, i - 1 if i else None) for i in range(4)]
    assert [len(collected.scored.groups) for collected in results] == [2] * 4
    assert all(collected.scored.metrics["rollout/staleness_max"].value <= 1 for collected in results)


async def test_saved_groups_are_trained_on_again_without_an_engine(settings, weights, tmp_path):
    template = str(tmp_path / "saved_{iteration}.jsonl")

    saved = await collect(await build(settings(save_debug_rollout_data=template)), weights, 0)
    flags = settings(load_debug_rollout_data=template)
    pipeline = await build_pipeline(
        Settings(model=flags.model, data=flags.data, reward=flags.reward, rollout=flags.rollout), host=None
    )
    loaded = await collect(pipeline, weights, 0)
    assert load_rollout(template, 0) == saved.scored.groups == loaded.scored.groups
    assert {name: m for name, m in loaded.scored.metrics.items() if name != "time/rollout"} == saved.scored.metrics


async def test_evaluation_repeats_and_leaves_training_alone(settings, weights):
    async def evaluate_and_collect(evaluations):
        pipeline = await build(settings())
        await pipeline.update_weights(weights, 0)
        metrics = [await pipeline.evaluate() for _ in range(evaluations)]
        async with pipeline.collecting(Start(0, None, 0)) as collected:
            return metrics, collected.scored

    (first, again), after = await evaluate_and_collect(2)
    assert first == again and "eval/held/reward" in first
    assert await evaluate_and_collect(0) == ([], after)


async def test_an_iteration_says_how_busy_the_engine_was(settings, weights):
    pipeline = await build(settings())
    load = (await collect(pipeline, weights, 0)).load
    assert 0 < load["perf/engine_busy"].value <= 1
    again = await collect(pipeline, weights, 1, 0)
    samples = sum(len(group.samples) for group in again.scored.groups)
    assert 1 <= again.load["perf/engine_responses"].value <= samples


async def test_evaluation_waits_for_the_end_of_an_iteration(settings, weights, monkeypatch):
    evaluated = []

    async def evaluate(*_):
        evaluated.append(True)
        return []

    monkeypatch.setattr(hooks, "evaluate", evaluate)
    pipeline = await build(settings())
    await pipeline.update_weights(weights, 0)
    async with pipeline.collecting(Start(0, None, 0)):
        evaluation = asyncio.create_task(pipeline.evaluate())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not evaluated
    await evaluation
    assert evaluated


async def test_an_iteration_waits_for_its_weights_and_for_the_one_before(settings, weights):
    pipeline, order = await build(settings(async_steps=1)), []

    async def run(iteration, after, version):
        async with pipeline.collecting(Start(iteration, after, version)) as collected:
            order.append(f"iteration {iteration}")
            return collected.scored.metrics

    async def update(version, after):
        await pipeline.update_weights(weights, version, after)
        order.append(f"weights {version}")

    metrics, *_ = await asyncio.gather(run(2, 1, 1), update(1, 1), run(1, 0, 0), run(0, None, 0), update(0, None))
    assert order == ["weights 0", "iteration 0", "iteration 1", "weights 1", "iteration 2"]
    assert metrics["rollout/staleness"].value == 1 and "time/rollout" in metrics


async def test_a_wrong_path_closes_the_engine_that_was_started(settings, monkeypatch):
    class Engine:
        closed = False

        async def close(self):
            self.closed = True

    engine = Engine()

    async def start_engine(settings, host):
        return engine

    monkeypatch.setattr(producer, "start_engine", start_engine)
    with pytest.raises(ValueError, match="--dynamic-sampling-filter-path no.such"):
        await build_pipeline(settings(dynamic_sampling_filter_path="no.such:filter"), host=None)
    assert engine.closed


async def test_an_engine_without_new_weights_generates_every_iteration_with_its_own(settings, weights):
    flags = settings()
    changed = [WeightChunk({name: 2 * tensor for name, tensor in weights[0].tensors.items()})]
    base, same, other = [await build(flags) for _ in range(3)]
    results = await collect(base, None, 0), await collect(same, weights, 0), await collect(other, changed, 0)
    assert results[0].scored.groups == results[1].scored.groups != results[2].scored.groups
    assert (await collect(base, None, 1, after=0)).scored.groups[0].samples[0].weight_versions[0] == 0


FUNCTIONS = """
import random

import numpy as np

class Numbers:
    def __init__(self, args):
        self.at, self.column = 0, args.input_key

    def draw(self, n):
        self.at += n
        return [{self.column: f"{i} + 1 =", "label": str(i + 1)} for i in range(self.at - n, self.at)]

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]

async def evaluate(args, tools):
    found = await tools.evaluate_sets()
    return {"twice": 2 * found["eval/held/reward"], "version": np.int64(tools.version), "sets": len(tools.eval_sets)}

async def says_nothing(args, tools):
    return None

def shortest(version, args, data, metrics):
    held = data["held"]
    assert list(data) == ["held"] and held["rewards"] == [float(-s.response_length) for s in held["samples"]]
    assert held["truncated"] == [s.status == "truncated" for s in held["samples"]]
    metrics["eval/held/shortest"] = version
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "pipeline_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "pipeline_functions"
    sys.modules.pop("pipeline_functions", None)


async def test_rows_of_a_users_source_are_drawn_and_a_resumed_run_continues_there(settings, weights, functions):
    flags = settings()
    data = replace(flags.data, prompt_data=None, rollout_shuffle=False, data_source_path=f"{functions}:Numbers")
    flags = validate(replace(flags, data=data)).settings
    pipeline = await build(flags)
    first = await collect(pipeline, weights, 0)
    assert [group.prompt.text for group in first.scored.groups] == ["0 + 1 =", "1 + 1 ="]
    state = json.loads(json.dumps(pipeline.state(1)))
    straight = await collect(pipeline, weights, 1, after=0)
    resumed = await build(flags)
    resumed.restore(state)
    again = await collect(resumed, weights, 1)
    assert [group.prompt.text for group in again.scored.groups] == ["2 + 1 =", "3 + 1 ="]
    assert [g.group_index for g in again.scored.groups] == [g.group_index for g in straight.scored.groups] == [2, 3]


def test_groups_that_were_not_finished_are_drawn_again(functions):
    def stream():
        return CustomStream(
            f"{functions}:Numbers", SimpleNamespace(input_key="x"), lambda row, i: Prompt(row["x"], (1,))
        )

    source = stream()
    source.draw(4)
    resumed = stream()
    resumed.restore(json.loads(json.dumps(source.state([1, 3]))))
    assert [(g.group_index, g.prompt.text) for g in resumed.draw(3)] == [(1, "1 + 1 ="), (3, "3 + 1 ="), (4, "4 + 1 =")]


async def test_a_function_evaluates(settings, weights, functions):
    flags = settings()

    async def evaluated(name):
        evaluation = replace(flags.evaluation, eval_function_path=f"{functions}:{name}")
        pipeline = await build(replace(flags, evaluation=evaluation))
        await pipeline.update_weights(weights, 3)
        return await pipeline.evaluate()

    built_in = await build(flags)
    await built_in.update_weights(weights, 3)
    accuracy = (await built_in.evaluate())["eval/held/reward"].value
    metrics = {name: metric.value for name, metric in (await evaluated("evaluate")).items()}
    assert metrics == {"eval/twice": 2 * accuracy, "eval/version": 3.0, "eval/sets": 1.0}
    with pytest.raises(ValueError, match="--eval-function-path .*says_nothing: returned None"):
        await evaluated("says_nothing")


async def test_a_function_adds_metrics_to_an_evaluation(settings, weights, functions):
    flags = settings()
    path = f"{functions}:shortest"
    evaluation = replace(flags.evaluation, custom_eval_rollout_log_function_path=path)
    pipeline = await build(replace(flags, evaluation=evaluation))
    await pipeline.update_weights(weights, 3)
    logged = await pipeline.evaluate()
    built_in = await build(flags)
    await built_in.update_weights(weights, 3)
    assert logged.pop("eval/held/shortest").value == 3.0  # the version
    assert logged == await built_in.evaluate()


async def test_a_teacher_scores_the_groups_that_are_kept(settings, weights):
    class Teacher:
        async def score(self, samples):
            for sample in samples:
                sample.teacher_log_probs = [-0.5] * sample.response_length

    pipeline = await build(settings())
    await pipeline.update_weights(weights, 0)
    tools = replace(pipeline.producer.tools, teacher=Teacher())
    spec = GroupSpec.for_training(settings().rollout, seed=1)
    (drawn,) = pipeline.stream.draw(1)
    result = await produce_group(drawn, tools, spec)
    assert all(sample.teacher_log_probs for sample in result.group.samples)
    dropping = replace(spec, group_filter=lambda group: FilterDecision(False, "no"))
    dropped = await produce_group(drawn, tools, dropping)
    assert not any(sample.teacher_log_probs for sample in dropped.group.samples)


async def test_conversations_are_collected_without_an_engine(settings, tmp_path):
    chats = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}] for answer in ("b", "cd")]
    chats.write_text("".join(json.dumps({"input": chat}) + "\n" for chat in turns))
    flags = Settings(
        model=settings().model,
        data=DataArguments(prompt_data=str(chats)),
        loss=LossArguments(loss_type="sft_loss"),
        rollout=RolloutArguments(num_rollout=1, rollout_batch_size=2),
        cluster=ClusterArguments(actor_num_gpus_per_node=1),
    )
    flags = validate(flags).settings
    pipeline = await build_pipeline(flags, host=None)
    collected = await collect(pipeline, None, 0)
    [[shard]] = ShardBuilder(flags).build(0, collected.scored.groups)
    assert pipeline.producer.engine is None and shard.batch.num_trajectories == 2
    with_ends_of_turns = 3 + 2
    assert shard.batch.num_loss_tokens == with_ends_of_turns
    assert collected.scored.metrics["rollout/loss_tokens"].value == with_ends_of_turns


def test_it_imports_no_ray():
    program = f"import sys; import {pipelines.__name__}, miles.batch.schedule; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("flag", ["rollout_all_samples_process_path", "custom_rollout_log_function_path"])
async def test_a_function_that_raises_stop_iteration_does_not_hang_the_run(
    settings, weights, tmp_path, monkeypatch, flag
):
    (tmp_path / "iterating_functions.py").write_text("def first(*given): return next(iter(()))")
    monkeypatch.syspath_prepend(str(tmp_path))
    pipeline = await build(settings(**{flag: "iterating_functions:first"}))
    with pytest.raises(UserCodeError, match="raised StopIteration"):
        await asyncio.wait_for(collect(pipeline, weights, 0), 60)
