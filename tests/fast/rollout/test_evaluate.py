from dataclasses import replace

import pytest

from miles.engine.base import SamplingParams
from miles.rollout.evaluate import EvalSet, evaluate
from miles.rollout.groups import GroupTools, generate_group
from miles.types.sample import Prompt

PROMPTS = tuple(Prompt(f"p{i}", (1,) * (i + 1), label=i, source=f"held.jsonl:{i + 1}") for i in range(3))


async def first_of_each(samples):
    return [float(s.trajectory_id % 4 == 0 and s.prompt.label > 0) for s in samples]


async def evaluated(engine, tokenizer, eval_sets, seed=1):
    per_set = await evaluate(eval_sets, GroupTools(engine, tokenizer, generate_group, first_of_each), seed)
    samples = [sample for _, set_samples in per_set for sample in set_samples]
    return {name: metric for metrics, _ in per_set for name, metric in metrics.items()}, samples


def eval_set(name="held", samples_per_prompt=4, **options):
    return EvalSet(name, PROMPTS, samples_per_prompt, SamplingParams(max_new_tokens=8, temperature=0.5), **options)


async def test_metrics_by_hand(scripted_engine, tokenizer):
    metrics, samples = await evaluated(scripted_engine(delays=(4, 0, 1)), tokenizer, [eval_set()])
    values = {name.removeprefix("eval/held/"): metric.value for name, metric in metrics.items()}
    assert values["accuracy"] == values["reward"] == pytest.approx(2 / 12)
    assert [values[f"pass@{k}"] for k in (1, 2, 4)] == pytest.approx([1 / 6, 1 / 3, 2 / 3])
    assert values["response_length"] == pytest.approx(sum(len(s.response_ids) for s in samples) / 12)
    assert values["truncated_fraction"] == values["reward_errors"] == 0
    assert [s.prompt.label for s in samples] == [0] * 4 + [1] * 4 + [2] * 4


async def test_a_mean_of_other_rewards_than_0_and_1_is_no_accuracy(scripted_engine, tokenizer):
    async def half(samples):
        return [0.5 * (s.prompt.label > 0) for s in samples]

    tools = GroupTools(scripted_engine(), tokenizer, generate_group, half)
    [(metrics, _)] = await evaluate([eval_set()], tools, 1)
    assert metrics["eval/held/reward"].value == pytest.approx(1 / 3) and "eval/held/accuracy" not in metrics


async def test_evaluations_repeat_their_seeds_whatever_the_order(scripted_engine, tokenizer):
    sets = [eval_set("a"), eval_set("b")]
    once = await evaluated(scripted_engine(), tokenizer, sets)
    again = await evaluated(scripted_engine((3, 0, 1)), tokenizer, sets)
    assert once == again
    assert once != await evaluated(scripted_engine(), tokenizer, sets, seed=2)


async def test_sets_draw_their_own_seeds(scripted_engine, tokenizer):
    engine = scripted_engine()
    await evaluated(engine, tokenizer, [eval_set("a"), eval_set("b")])
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(seeds) == len(set(seeds)) == 2 * 3 * 4


async def test_one_sample_a_prompt_has_no_pass_at_k(scripted_engine, tokenizer):
    metrics, _ = await evaluated(scripted_engine(), tokenizer, [eval_set(samples_per_prompt=1)])
    assert not [name for name in metrics if "pass@" in name]


async def test_the_context_limit_holds_here_too(scripted_engine, tokenizer):
    engine = scripted_engine()
    await evaluated(engine, tokenizer, [eval_set(max_context_len=5)])
    assert [r.sampling.max_new_tokens for r in engine.requests] == [4, 3, 2]


async def test_a_trajectory_of_several_samples_is_one_answer(scripted_engine, tokenizer):
    async def first_in_two(group, engine, tokenizer, spec):
        made = await generate_group(group, engine, tokenizer, spec)
        return replace(made, samples=[made.samples[0], *made.samples])

    tools = GroupTools(scripted_engine(), tokenizer, first_in_two, first_of_each)
    [(metrics, _)] = await evaluate([eval_set()], tools, 1)
    values = {name.removeprefix("eval/held/"): metric.value for name, metric in metrics.items()}
    assert values["accuracy"] == pytest.approx(2 / 12)
    assert [values[f"pass@{k}"] for k in (1, 2, 4)] == pytest.approx([1 / 6, 1 / 3, 2 / 3])
