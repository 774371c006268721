"""Evaluation on held-out sets. Its seeds repeat, so two evaluations differ by the weights only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from miles.base.threads import gather_or_cancel
from miles.config.evaluation import eval_entries
from miles.config.inputs import load_held_out_prompts
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.engine.base import SamplingParams
from miles.rollout.groups import GroupSpec, GroupTools, produce_group, response_seed
from miles.rollout.metrics import pass_at_k_metrics, response_metrics, reward_part_metrics
from miles.tasks.rewards.registry import passes_of
from miles.types.metrics import Metric
from miles.types.sample import Prompt, PromptGroup, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvalSet:
    """One held-out set. Its metrics are named ``eval/<name>/…``."""

    name: str
    prompts: tuple[Prompt, ...]
    samples_per_prompt: int
    sampling: SamplingParams
    max_context_len: int | None = None  # of prompt and response together


async def evaluate(
    eval_sets: Sequence[EvalSet], tools: GroupTools, seed: int
) -> list[tuple[dict[str, Metric], list[Sample]]]:
    """Return the metrics of each set and its scored samples, in the order of prompts and seeds.

    The metrics are ``eval/<name>/…``: reward (the mean), also as accuracy if every reward is 0 or 1,
    reward_parts/NAME, response_length, truncated_fraction, aborted_fraction, reward_errors and, with more than one
    sample per prompt, pass@k for powers of two. The prompts of all sets are in flight together.
    """
    return await gather_or_cancel(_evaluate_set(eval_set, tools, seed) for eval_set in eval_sets)


async def _evaluate_set(eval_set: EvalSet, tools: GroupTools, seed: int) -> tuple[dict[str, Metric], list[Sample]]:
    spec = GroupSpec(
        eval_set.sampling,
        eval_set.samples_per_prompt,
        partial(response_seed, seed, "eval", eval_set.name),
        eval_set.max_context_len,
    )
    drawn = [PromptGroup(i, prompt) for i, prompt in enumerate(eval_set.prompts)]
    produced = await gather_or_cancel(produce_group(group, tools, spec) for group in drawn)
    groups = [p.group for p in produced]
    samples = [sample for group in groups for sample in group.samples]
    rewards = [value for group in groups for value in group.trajectory_rewards]
    metrics = {"reward": Metric.mean(rewards)}
    if {*rewards} <= {0.0, 1.0}:
        metrics["accuracy"] = Metric.mean(rewards)
    metrics |= reward_part_metrics(samples)
    metrics |= response_metrics(samples)
    metrics["reward_errors"] = Metric(sum(p.reward_errors for p in produced), 1.0)
    if eval_set.samples_per_prompt > 1:
        metrics |= pass_at_k_metrics(map(passes_of, groups))
    return {f"eval/{eval_set.name}/{name}": metric for name, metric in metrics.items()}, samples


def load_eval_sets(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[EvalSet]:
    """Return the sets of ``--eval-config``, else of ``--eval-prompt-data``; an empty list if neither is given.

    Rows that the reward cannot score are refused.

    Raises:
        InputError: As ``eval_entries`` and ``load_prompts`` do.
    """
    data, rollout, reward = settings.data, settings.rollout, settings.reward
    return [
        _eval_set(entry, load_held_out_prompts(entry, data, rollout, reward, tokenizer), rollout)
        for entry in eval_entries(settings.evaluation)
    ]


def _eval_set(entry: Mapping[str, Any], prompts: Iterable[Prompt], rollout: RolloutArguments) -> EvalSet:
    sampling = SamplingParams(
        max_new_tokens=entry["max_response_len"],
        temperature=entry["temperature"],
        top_p=entry["top_p"],
        top_k=entry["top_k"],
        min_p=entry["min_p"],
        stop_token_ids=rollout.stop_token_ids,
        stop_texts=rollout.stop_texts,
    )
    samples_per_prompt = entry["n_samples_per_eval_prompt"]
    return EvalSet(entry["name"], tuple(prompts), samples_per_prompt, sampling, rollout.rollout_max_context_len)
