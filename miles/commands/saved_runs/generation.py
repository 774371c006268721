"""Generate with the weights of a saved run, in one process and without Ray: evaluate sets, and answer a prompt.

Prompts, sampling, rewards and the engine are the run's, so an evaluation repeats the run's own measurement after the
same step.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from miles.base.secrets import HIDDEN
from miles.base.text import InputError
from miles.base.tokenizer import load_tokenizer
from miles.config.components import engine_spec
from miles.config.evaluation import fill_evaluation
from miles.config.inputs import load_training_prompts
from miles.config.settings import Settings
from miles.config.spelling import group_words
from miles.engine.base import Engine, LocalHost, start_engine
from miles.rollout.chosen_generator import group_generator
from miles.rollout.evaluate import EvalSet, evaluate, load_eval_sets
from miles.rollout.groups import GroupSpec, GroupTools, response_seed, sampling_params
from miles.rollout.intervals import Estimate, mean_over_prompts
from miles.rollout.metrics import pass_at_k, powers_of_two
from miles.tasks.data.images import ImageReader
from miles.tasks.data.row import Notes, Row
from miles.tasks.data.tokenizer import PromptRenderer
from miles.tasks.rewards.registry import get_reward_function, passes_of
from miles.tasks.rewards.scoring import score
from miles.types.sample import IMAGE_PLACEHOLDER, Prompt, PromptGroup, Sample


def settings_for(settings: Settings, model: Path, logs: Path, engine: str | None) -> Settings:
    """Return the run's settings for generating here: one engine that starts with ``model``.

    Args:
        settings: The settings of the run.
        model: A Hugging Face folder.
        logs: Where servers write their logs.
        engine: The engine; None is the run's.
    """
    name = engine or settings.rollout.rollout_engine
    device = _device(settings.cluster.device)
    devices = settings.sglang.rollout_num_gpus_per_engine if device == "cuda" else 1
    passed_on = settings.server_flags if name == settings.rollout.rollout_engine else type(settings.server_flags)()
    return replace(
        settings,
        model=replace(settings.model, hf_checkpoint=str(model)),
        rollout=replace(settings.rollout, rollout_engine=name, load_debug_rollout_data=None),
        cluster=replace(
            settings.cluster,
            device=device,
            colocate=False,
            rollout_num_gpus=devices if engine_spec(name).has_servers else None,
        ),
        sglang=replace(
            settings.sglang,
            rollout_num_gpus_per_engine=devices,
            rollout_external=False,
            rollout_external_engine_addrs=None,
            use_fault_tolerance=False,
        ),
        tracking=replace(settings.tracking, output_dir=str(logs)),
        server_flags=replace(passed_on, server=_without_secrets(passed_on.server), router=()),
    )


def _without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """Leave out the flags that run.json holds without their secret values: keys, which are drawn again."""
    groups = ((flag, *values) for flag, values in group_words(words) if HIDDEN not in values)
    return tuple(word for group in groups for word in group)


def _device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@asynccontextmanager
async def _engine(settings: Settings) -> AsyncIterator[Engine]:
    disable_progress_bar()  # of loading weights
    engine = await start_engine(settings, LocalHost(settings.cluster.device))
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class SetResult:
    """The results of an evaluation of one set.

    Attributes:
        name: The set.
        prompts: How many it has.
        samples_per_prompt: Answers to each.
        estimates: ``accuracy``, or ``reward`` if not all are 0 or 1, and, with several answers, ``pass@k``: means over
            prompts.
        means: Plain means: response_length, truncated_fraction, …
        samples: All scored answers.
    """

    name: str
    prompts: int
    samples_per_prompt: int
    estimates: dict[str, Estimate]
    means: dict[str, float]
    samples: list[Sample]


async def evaluate_sets(settings: Settings, sets: Sequence[str], samples_per_prompt: int | None) -> list[SetResult]:
    """Evaluate held-out sets.

    Args:
        settings: From ``settings_for``.
        sets: NAME SOURCE pairs; empty: the sets of the run.
        samples_per_prompt: Answers per prompt; None is the run's number.

    Raises:
        InputError: There is no set, or one cannot be read; no reward function.
    """
    evaluation = settings.evaluation
    if sets:
        evaluation = replace(evaluation, eval_prompt_data=tuple(sets), eval_config=None)
    if not evaluation.has_sets:
        raise InputError("--sets is required: the run evaluated no set; give NAME SOURCE pairs")
    if samples_per_prompt is not None:
        evaluation = replace(evaluation, n_samples_per_eval_prompt=samples_per_prompt)
    evaluation = fill_evaluation(evaluation, settings.rollout, settings.data)
    reward = settings.reward
    tokenizer = load_tokenizer(str(settings.model.hf_checkpoint))
    loaded = load_eval_sets(replace(settings, evaluation=evaluation), tokenizer)
    if samples_per_prompt is not None:  # also if --eval-config states another number
        loaded = [replace(eval_set, samples_per_prompt=samples_per_prompt) for eval_set in loaded]
    reward_function = get_reward_function(reward)
    async with _engine(settings) as engine, group_generator(settings) as generate:
        tools = GroupTools(engine, tokenizer, generate, reward_function, reward.reward_error_value, reward.drops_errors)
        return [await _evaluate(eval_set, tools, settings.data.rollout_seed) for eval_set in loaded]


async def _evaluate(eval_set: EvalSet, tools: GroupTools, seed: int) -> SetResult:
    [(metrics, samples)] = await evaluate([eval_set], tools, seed)
    values = {name.removeprefix(f"eval/{eval_set.name}/"): metric.value for name, metric in metrics.items()}
    groups = [PromptGroup(number, prompt) for number, prompt in enumerate(eval_set.prompts)]
    for sample in samples:
        groups[sample.group_index].samples.append(sample)
    for group in groups:
        group.dropped_trajectories = eval_set.samples_per_prompt - len(group.trajectories)
    rewards, passed = [group.trajectory_rewards for group in groups], [passes_of(group) for group in groups]
    estimated = [name for name in values if name in ("accuracy", "reward") or name.startswith("pass@")]
    means = {name: value for name, value in values.items() if name not in estimated}
    per_prompt = eval_set.samples_per_prompt
    return SetResult(eval_set.name, len(eval_set.prompts), per_prompt, estimates(rewards, passed), means, samples)


def estimates(
    rewards_by_prompt: Sequence[Sequence[float]], passes_by_prompt: Sequence[Sequence[bool]]
) -> dict[str, Estimate]:
    """Return the mean reward, called accuracy if each is 0 or 1, and pass@k for powers of two.

    Each has its interval over prompts. Answers without a reward (``--reward-error drop``) are in the passes alone, as
    failures.

    >>> by_name = estimates([[1.0, 1.0], [0.0, 0.0]], [[True, True], [False, False]])
    >>> {name: str(estimate) for name, estimate in by_name.items()}
    {'accuracy': '0.500 [0.095, 0.905]', 'pass@1': '0.500 [0.095, 0.905]', 'pass@2': '0.500 [0.095, 0.905]'}

    Raises:
        InputError: No answer has a reward.
    """
    answered = [rewards for rewards in rewards_by_prompt if rewards]
    if not answered:
        raise InputError("the reward function failed on every answer (--reward-error drop); correct it")
    is_accuracy = {reward for rewards in answered for reward in rewards} <= {0.0, 1.0}
    means = mean_over_prompts([sum(rewards) / len(rewards) for rewards in answered])
    by_name = {"accuracy" if is_accuracy else "reward": means}
    most = max(map(len, passes_by_prompt))
    if most > 1:
        for k in powers_of_two(most):
            rates = [pass_at_k(len(passed), sum(passed), k) for passed in passes_by_prompt if len(passed) >= k]
            by_name[f"pass@{k}"] = mean_over_prompts(rates)
    return by_name


async def answer(
    settings: Settings,
    ask: str | int,
    n: int,
    seed: int,
    temperature: float | None,
    max_new_tokens: int | None,
    images: Sequence[str] = (),
) -> list[Sample]:
    """Return ``n`` answers to a prompt, rendered as the run renders its own. Answers to a row are scored.

    Args:
        settings: From ``settings_for``.
        ask: The prompt, one user message if the run uses a chat template; or the number of a prompt of the run's data.
        n: How many answers.
        seed: The seed of the sampling, with engines that honour seeds.
        temperature: None is the run's.
        max_new_tokens: None is the run's.
        images: Paths. The text ``<image>`` stands for each; without any they come first.

    Raises:
        InputError: The prompt is empty, the template refuses it, the run's prompts have no images, or its data no such
            row.
        RewardError: The reward function fails on an answer.
    """
    tokenizer = load_tokenizer(str(settings.model.hf_checkpoint))
    prompt = _row(settings, tokenizer, ask) if isinstance(ask, int) else _rendered(settings, tokenizer, ask, images)
    sampling = sampling_params(settings.rollout)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    if max_new_tokens is not None:
        sampling = replace(sampling, max_new_tokens=max_new_tokens)
    sampling.check()
    async with _engine(settings) as engine, group_generator(settings) as generate:
        limit = settings.rollout.rollout_max_context_len
        spec = GroupSpec(sampling, n, lambda _, k: response_seed(seed, "sample", k), limit)
        group = await generate(PromptGroup(0, prompt), engine, tokenizer, spec)
    if isinstance(ask, int):
        reward = settings.reward
        await score(group.samples, get_reward_function(reward), reward.reward_error_value, drop=reward.drops_errors)
    return group.samples


def _row(settings: Settings, tokenizer: PreTrainedTokenizerBase, number: int) -> Prompt:
    """Return a prompt of the run's data, counted from 1 over all of its sets."""
    left = number
    for name, source in settings.data.mixed_sources.items():
        prompts: Sequence[Prompt] = load_training_prompts(name, source, settings, tokenizer)
        if left <= len(prompts):
            return prompts[left - 1]
        left -= len(prompts)
    raise InputError(f"--row {number}: only {number - left} prompts of the run are short enough; give a smaller one")


def _rendered(settings: Settings, tokenizer: PreTrainedTokenizerBase, text: str, images: Sequence[str]) -> Prompt:
    """Return the prompt of a text."""
    data = settings.data
    if images:
        data = replace(data, multimodal_keys='{"image": "images"}')
        if not data.apply_chat_template or ImageReader.of_model(data, tokenizer.name_or_path) is None:
            raise InputError("--image: the run has no chat template, or its model reads no images; drop it")
        text = text if IMAGE_PLACEHOLDER in text else IMAGE_PLACEHOLDER * len(images) + text
    renderer = PromptRenderer(data, tokenizer)
    rendered = renderer.render(Row("the prompt", {"images": list(images)} if images else {}), text, Notes())
    ids = rendered.token_ids
    if ids is None:
        ids = tokenizer(rendered.text, add_special_tokens=not renderer.uses_template)["input_ids"]
    return Prompt(rendered.text, tuple(ids), source="the prompt", input=text, images=rendered.images)
