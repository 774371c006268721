"""Evaluation on held-out sets. Its seeds repeat, so two evaluations differ by the weights only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from miles.base import strict_json
from miles.base.flags import LONGEST_VALUE, fault_of_size
from miles.base.text import InputError, one_line
from miles.config.evaluation import EvaluationArguments
from miles.config.rollout import RolloutArguments
from miles.engine.base import SamplingParams, gather_or_cancel
from miles.rollout.groups import GroupSpec, GroupTools, produce_group, response_seed
from miles.rollout.metrics import pass_at_k_metrics, response_metrics, reward_part_metrics
from miles.tasks.data.prompts import load_prompts
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.passing import passes_of
from miles.tasks.rewards.settings import RewardArguments
from miles.types.metrics import Metric
from miles.types.sample import Prompt, PromptGroup, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT, _COUNT, _NUMBER = (str,), (int,), (int, float)
_KEYS: dict[str, tuple[type, ...]] = {  # what an entry of --eval-config may hold
    "name": _TEXT,
    "source": _TEXT,
    "n_samples_per_eval_prompt": _COUNT,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _COUNT,
    "min_p": _NUMBER,
    "max_response_len": _COUNT,
    "input_key": _TEXT,
    "label_key": _TEXT,
}


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
) -> tuple[dict[str, Metric], list[Sample]]:
    """Return the metrics of every set, and all scored samples in the order of sets, prompts and seeds.

    The metrics are ``eval/<name>/…``: reward (the mean), also as accuracy if every reward is 0 or 1,
    reward_parts/NAME, response_length, truncated_fraction, aborted_fraction, reward_errors and, with more than one
    sample per prompt, pass@k for powers of two. The prompts of all sets are in flight together.
    """
    per_set = await gather_or_cancel(_evaluate_set(eval_set, tools, seed) for eval_set in eval_sets)
    metrics: dict[str, Metric] = {}
    samples: list[Sample] = []
    for set_metrics, set_samples in per_set:
        metrics |= set_metrics
        samples += set_samples
    return metrics, samples


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
    rewards = [value for group in groups for value in group.rewards]
    metrics = {
        "reward": Metric.mean(rewards),
        **({"accuracy": Metric.mean(rewards)} if {*rewards} <= {0.0, 1.0} else {}),
        **reward_part_metrics(samples),
        **response_metrics(samples),
        "reward_errors": Metric(sum(p.reward_errors for p in produced), 1.0),
    }
    if eval_set.samples_per_prompt > 1:
        metrics |= pass_at_k_metrics(map(passes_of, groups))
    return {f"eval/{eval_set.name}/{name}": metric for name, metric in metrics.items()}, samples


def load_eval_sets(
    evaluation: EvaluationArguments,
    data: DataArguments,
    rollout: RolloutArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    reward: RewardArguments | None = None,
) -> list[EvalSet]:
    """Return the sets of ``--eval-config``, else of ``--eval-prompt-data``; an empty list if neither is given.

    What a set does not specify is taken from the ``--eval-*`` flags. Rows that ``reward`` cannot score are refused.

    Raises:
        InputError: The words of ``--eval-prompt-data`` are not pairs, a name is given twice, or the file has a fault.
            The message names set and key.
    """
    if evaluation.eval_config is not None:
        entries = _read_config(Path(evaluation.eval_config))
    else:
        entries = _read_pairs(() if evaluation.eval_prompt_data is None else evaluation.eval_prompt_data)
    names = [entry["name"] for entry in entries]
    for name in names:
        if names.count(name) > 1:
            flag = "--eval-config" if evaluation.eval_config is not None else "--eval-prompt-data"
            raise InputError(
                f"{flag}: the set name {name} is given {names.count(name)} times; give each set its own name"
            )
    load = partial(load_prompts, reward=reward)
    return [_load(entry, evaluation, data, rollout, tokenizer, load) for entry in entries]


def _load(
    entry: dict[str, Any],
    evaluation: EvaluationArguments,
    data: DataArguments,
    rollout: RolloutArguments,
    tokenizer: PreTrainedTokenizerBase,
    load: Callable[..., Sequence[Prompt]],
) -> EvalSet:
    chosen: dict[str, Any] = {
        "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
        "temperature": evaluation.eval_temperature,
        "top_p": evaluation.eval_top_p,
        "top_k": evaluation.eval_top_k,
        "min_p": evaluation.eval_min_p,
        "max_response_len": evaluation.eval_max_response_len,
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
    } | entry
    prompts = load(
        chosen["source"],
        data,
        tokenizer,
        input_key=chosen["input_key"],
        label_key=chosen["label_key"],
        max_context_len=rollout.rollout_max_context_len,
    )
    sampling = SamplingParams(
        max_new_tokens=chosen["max_response_len"],
        temperature=chosen["temperature"],
        top_p=chosen["top_p"],
        top_k=chosen["top_k"],
        min_p=chosen["min_p"],
        stop_token_ids=rollout.stop_token_ids,
        stop_texts=rollout.stop_texts,
    )
    samples_per_prompt, longest = chosen["n_samples_per_eval_prompt"], rollout.rollout_max_context_len
    return EvalSet(chosen["name"], tuple(prompts), samples_per_prompt, sampling, longest)


def _read_pairs(words: tuple[str, ...]) -> list[dict[str, Any]]:
    if len(words) % 2:
        raise InputError(
            f"--eval-prompt-data {' '.join(words)}: {len(words)} words are not NAME SOURCE pairs; "
            "give a name before each source, e.g. heldout data/heldout.jsonl"
        )
    return [{"name": name, "source": source} for name, source in zip(words[::2], words[1::2], strict=True)]


def _read_config(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        config = strict_json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"--eval-config {path}: cannot read the file ({error.strerror}); check the path") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        language = "JSON" if path.suffix == ".json" else "YAML"
        reason = one_line(str(error), 300)
        raise InputError(f"--eval-config {path}: not valid {language} ({reason}); correct it there") from error
    if not isinstance(config, list) or not config:
        raise InputError(f"--eval-config {path}: holds no list of sets; write a list of objects with name and source")
    for number, entry in enumerate(config, start=1):
        _check_entry(entry, f"--eval-config {path}, set {number}")
    return config


def _check_entry(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: {entry!r} is not an object; write one with name and source")
    for key, value in entry.items():
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise InputError(f"{where}: unknown key {key}; {hint}")
        if isinstance(value, bool) or not isinstance(value, _KEYS[key]):
            kinds = " or ".join(kind.__name__ for kind in _KEYS[key])
            raise InputError(f"{where}: {key} is {value!r}; give a value of type {kinds}, or remove the key")
    for key in ("name", "source"):
        if not entry.get(key):
            raise InputError(f"{where}: has no {key}; every set needs a name and a source")
    _check_ranges(entry, where)


def _check_ranges(entry: dict[str, Any], where: str) -> None:
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "n_samples_per_eval_prompt": (lambda v: v >= 1, "at least 1"),
        "max_response_len": (lambda v: v >= 1, "at least 1"),
        "temperature": (lambda v: 0 <= v < float("inf"), "finite, and 0 (greedy) or more"),
        "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
        "top_k": (lambda v: v == -1 or v >= 1, "-1 (all) or at least 1"),
        "min_p": (lambda v: 0 <= v <= 1, "from 0 (all) to 1"),
    }
    for key, (holds, rule) in rules.items():
        if key in entry and not holds(entry[key]):
            raise InputError(f"{where}: {key} is {entry[key]}; it must be {rule}")
    for key, value in entry.items():
        if isinstance(value, int | float) and (fault := fault_of_size(key, value)) is not None:
            raise InputError(f"{where}: {key} is {one_line(str(value), LONGEST_VALUE)}; it {fault}")
