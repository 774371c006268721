"""One prompt group, from a drawn prompt to scored samples: generate, score, filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from miles.base.profiling import span, waiting
from miles.base.threads import gather_or_cancel
from miles.base.user_code import ordinary_errors
from miles.config.rollout import RolloutArguments
from miles.engine.base import Engine, FinishReason, Generation, GenerationRequest, SamplingParams, ServedTeacher
from miles.rollout.filters import FilterDecision, load_group_filter
from miles.tasks.rewards.base import RewardFunction
from miles.tasks.rewards.scoring import score
from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus

if TYPE_CHECKING:
    from miles.rollout.workers.pool import WorkerPool

# The text of an answer, as rewards see it.


class Detokenizer(Protocol):
    """The part of a tokenizer that generation needs."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Return the text of one sequence: a list of integers, or an array of them."""

    def __hash__(self) -> int:
        """Return the hash, which caches need."""


def answer_text(
    tokenizer: Detokenizer, token_ids: Sequence[int], mask: Sequence[int], ended: bool, stop_texts: Sequence[str] = ()
) -> str:
    """Return the text of a response, with the special tokens that the model wrote, such as ``</think>`` of some models.

    Left out are special tokens that ended an answer, unless they have a text of ``stop_texts``, and the special tokens
    of tools and environments.

    Args:
        tokenizer: The model's.
        token_ids: The response, of one or more answers.
        mask: 1 for each token of the model, 0 for tokens of tools and environments.
        ended: Whether the last token ended its answer.
        stop_texts: Those that ended answers, and stay in them.
    """
    sampled = np.asarray(mask, bool)
    ends = sampled & ~np.append(sampled[1:], False)  # the last token of each answer
    ends[-1:] &= ended
    hidden: list[int] = []
    for at in np.flatnonzero(ends | ~sampled).tolist():
        text = _special_text(tokenizer, token_ids[at])
        if text and not (sampled[at] and any(stop in text for stop in stop_texts)):
            hidden.append(at)
    # An array: of a list, transformers looks at the type of every number.
    return str(tokenizer.decode(np.delete(np.asarray(token_ids, np.int64), hidden), skip_special_tokens=False))


@lru_cache(maxsize=1 << 16)  # a tool's tokens are looked at in every later turn
def _special_text(tokenizer: Detokenizer, token: int) -> str:
    """Return the text of a special token; none for another token."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return "" if text == tokenizer.decode([token], skip_special_tokens=True) else text


SeedOf = Callable[[int, int], int]  # (group_index, position of the sample in its group) -> seed

STATUS: dict[FinishReason, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


class GroupGenerator(Protocol):
    """Generates the unscored samples of a group. ``generate_group`` is one; another calls a user's function."""

    async def __call__(self, group: PromptGroup, engine: Engine, tokenizer: Any, spec: GroupSpec) -> PromptGroup:
        """Return a new group with ``spec.n_samples`` trajectories of ``group``'s prompt.

        Trajectory k has ``trajectory_id = group_index * n_samples + k``.
        """


@dataclass(frozen=True)
class GroupTools:
    """The tools that produce groups, in training and in evaluation.

    ``reward_error_value`` is the reward of samples that the reward function fails on; None raises instead, unless
    ``drops_reward_errors``. ``teacher`` scores the samples of groups that are trained on. If there are ``workers``,
    groups are produced there, with tools of their own.
    """

    engine: Engine
    tokenizer: Any  # a transformers tokenizer; see ``Detokenizer``
    generate: GroupGenerator
    reward_function: RewardFunction
    reward_error_value: float | None = None
    drops_reward_errors: bool = False
    teacher: ServedTeacher | None = None
    workers: WorkerPool | None = None


@dataclass(frozen=True)
class GroupSpec:
    """How the samples of a group are drawn, and which groups are kept (all, if there is no filter)."""

    sampling: SamplingParams
    n_samples: int
    seed_of: SeedOf
    max_context_len: int | None = None  # prompt and response together, in tokens
    group_filter: Callable[[PromptGroup], FilterDecision] | None = None
    greedy_baseline: bool = False  # generate and score a greedy response too, for ``PromptGroup.baseline_reward``
    trains: bool = False  # the group is trained on, and not an evaluation's

    @classmethod
    def for_training(cls, rollout: RolloutArguments, seed: int, greedy_baseline: bool = False) -> GroupSpec:
        """Return the spec that the flags of training ask for, and the greedy response if the estimator reads one.

        Raises:
            ValueError: ``--dynamic-sampling-filter-path`` cannot be imported.
        """
        path = rollout.dynamic_sampling_filter_path
        return cls(
            sampling_params(rollout),
            rollout.n_samples_per_prompt,
            partial(response_seed, seed),
            rollout.rollout_max_context_len,
            None if path is None else load_group_filter(path),
            greedy_baseline,
            trains=True,
        )


REWARD_ERROR = "reward_error"  # the reason to drop a group: it lacks rewards


@dataclass(frozen=True)
class ProducedGroup:
    """A generated and scored group. ``drop_reason`` is None if the filter keeps it."""

    group: PromptGroup
    reward_errors: int = 0  # samples that the reward function failed on
    drop_reason: str | None = None


async def produce_group(drawn: PromptGroup, tools: GroupTools, spec: GroupSpec) -> ProducedGroup:
    """Generate, score and filter one group, and have a teacher score it if it is kept; many calls run at once.

    Truncated and aborted samples are kept, and scored like the others.

    Raises:
        Exception: Whatever generation, the reward function and the filter raise.
    """
    if tools.workers is not None:
        return await tools.workers.produce(drawn, spec)
    with ordinary_errors(f"the code that makes group {drawn.group_index}"):
        return await _produce(drawn, tools, spec)


async def _produce(drawn: PromptGroup, tools: GroupTools, spec: GroupSpec) -> ProducedGroup:
    greedy = [_generate_greedy(drawn, tools, spec)] if spec.greedy_baseline else []
    with waiting("generate a group"):
        generation = tools.generate(drawn, tools.engine, tools.tokenizer, spec)
        group, *baselines = await gather_or_cancel([generation, *greedy])
    drops = tools.drops_reward_errors
    with waiting("score a group"):
        errors = await score(group.samples, tools.reward_function, tools.reward_error_value, drop=drops)
    for baseline in baselines:  # none or one
        errors += await score(baseline.samples, tools.reward_function, tools.reward_error_value, drop=drops)
        group.baseline_tokens += sum(len(sample.response_ids) for sample in baseline.samples)
        rewards = [sample.reward for sample in baseline.samples if sample.reward is not None]
        group.baseline_reward = fmean(rewards) if len(rewards) == len(baseline.samples) else None
    if errors and drops:
        _drop_unscored(group)
        if not group.samples or (baselines and group.baseline_reward is None):
            return ProducedGroup(group, errors, REWARD_ERROR)
    decision = None if spec.group_filter is None else spec.group_filter(group)
    if tools.teacher is not None and (decision is None or decision.keep):
        await tools.teacher.score(group.samples)
    return ProducedGroup(group, errors, None if decision is None or decision.keep else decision.reason)


async def _generate_greedy(drawn: PromptGroup, tools: GroupTools, spec: GroupSpec) -> PromptGroup:
    """Generate one trajectory at temperature 0. It is scored and not trained on, so its trajectory_id is not read."""
    sampling = replace(spec.sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
    sampling = replace(sampling, returns_support=False, returns_experts=False)
    return await tools.generate(drawn, tools.engine, tools.tokenizer, replace(spec, sampling=sampling, n_samples=1))


def _drop_unscored(group: PromptGroup) -> None:
    """Remove the trajectories that have a sample without reward: a part of a trajectory is no trajectory."""
    unscored = {sample.trajectory_id for sample in group.samples if sample.reward is None}
    group.samples = [sample for sample in group.samples if sample.trajectory_id not in unscored]
    group.dropped_trajectories += len(unscored)


def response_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a pure function of ``parts`` (run seed, group, sample, …) on every machine.

    It is a hash rather than a counter: a resumed run repeats its seeds exactly, and neighbors share no structure.
    """
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_params(rollout: RolloutArguments) -> SamplingParams:
    """Return the sampling of training. Engines add the model's own end-of-sequence tokens to the stop tokens."""
    assert rollout.rollout_max_response_len is not None, "validate() requires --rollout-max-response-len"
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop_token_ids=rollout.stop_token_ids,
        stop_texts=rollout.stop_texts,
        min_p=rollout.rollout_min_p,
        returns_support=rollout.replays_support,
        returns_experts=rollout.use_rollout_routing_replay,
    )


def fit_context(sampling: SamplingParams, prompt: Prompt, max_context_len: int | None) -> SamplingParams:
    """Return ``sampling`` with ``max_new_tokens`` cut so that prompt and response fit into ``max_context_len`` tokens.

    Raises:
        ValueError: The prompt leaves no room for a response.
    """
    if max_context_len is None:
        return sampling
    room = max_context_len - len(prompt.token_ids)
    if room < 1:
        raise ValueError(
            f"--rollout-max-context-len {max_context_len}: the prompt {prompt.source or repr(prompt.text[:40])} alone "
            f"has {len(prompt.token_ids)} tokens, which leaves no room for a response; raise the limit, or drop such "
            f"prompts with --rollout-max-prompt-len"
        )
    return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))


async def generate_group(group: PromptGroup, engine: Engine, tokenizer: Detokenizer, spec: GroupSpec) -> PromptGroup:
    """Generate a group in one engine request: a ``GroupGenerator`` whose trajectories have one sample each.

    The text of a sample comes from ``answer_text``, after the part of the answer that its prompt has. Its mask is 1 on
    every generated token.

    Raises:
        ValueError: The prompt leaves no room for a response (``fit_context``), or the engine refuses it.
    """
    request = GenerationRequest(
        prompt_ids=group.prompt.token_ids,
        seeds=tuple(spec.seed_of(group.group_index, k) for k in range(spec.n_samples)),
        sampling=fit_context(spec.sampling, group.prompt, spec.max_context_len),
        images=group.prompt.images,
    )
    generations = await engine.generate(request)
    assert len(generations) == spec.n_samples, (
        f"the engine gave {len(generations)} responses for {spec.n_samples} seeds"
    )
    first_id = group.group_index * spec.n_samples
    with span("make samples"):
        samples = [
            _sample(group, first_id + k, generation, tokenizer, spec.sampling.stop_texts)
            for k, generation in enumerate(generations)
        ]
    return PromptGroup(group.group_index, group.prompt, samples)


def _sample(
    group: PromptGroup, trajectory_id: int, generation: Generation, tokenizer: Detokenizer, stop_texts: Sequence[str]
) -> Sample:
    mask = [1] * len(generation.token_ids)
    ended = generation.finish_reason == "stop"
    text = answer_text(tokenizer, generation.token_ids, mask, ended, stop_texts)
    sample = Sample(
        prompt=group.prompt,
        group_index=group.group_index,
        trajectory_id=trajectory_id,
        response_ids=list(generation.token_ids),
        response=group.prompt.prefill + text,
        loss_mask=mask,
        rollout_log_probs=list(generation.log_probs),
        status=STATUS[generation.finish_reason],
        weight_versions=generation.token_versions,
        support=generation.support,
        experts=generation.experts,
    )
    sample.check()
    return sample
