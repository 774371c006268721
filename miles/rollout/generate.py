"""One prompt group: from a drawn prompt to its generated samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from miles.arguments.rollout import RolloutArguments
from miles.engine.base import Engine, FinishReason, Generation, GenerationRequest, SamplingParams
from miles.sample import Prompt, PromptGroup, Sample, SampleStatus

SeedOf = Callable[[int, int], int]  # (group_index, number of the sample in its group) -> seed

STATUS: dict[FinishReason, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


class Detokenizer(Protocol):
    """The part of a tokenizer that generation needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...  # str for one sequence


class GroupGenerator(Protocol):
    """A new group with ``n_samples`` generated, unscored trajectories of ``group``'s prompt; ``generate_group`` is one.

    Trajectory k has ``trajectory_id = group_index * n_samples + k``.
    """

    async def __call__(
        self,
        group: PromptGroup,
        engine: Engine,
        sampling: SamplingParams,
        tokenizer: Any,
        *,
        n_samples: int,
        seed_of: SeedOf,
        max_context_len: int | None = None,
    ) -> PromptGroup: ...


def response_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of ``parts`` (run seed, group, sample, …), alike on every machine.

    A hash rather than a counter: a resumed run repeats its seeds exactly, and neighbours share no structure.
    """
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_params(rollout: RolloutArguments) -> SamplingParams:
    """The sampling of training rollouts. Engines add the model's own end-of-sequence tokens to the stop tokens."""
    assert rollout.rollout_max_response_len is not None, "validate() requires --rollout-max-response-len"
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop_token_ids=tuple(rollout.rollout_stop_token_ids or ()),
    )


def fit_context(sampling: SamplingParams, prompt: Prompt, max_context_len: int | None) -> SamplingParams:
    """``sampling`` with ``max_new_tokens`` cut so that prompt and response stay within ``max_context_len`` tokens.

    Raises ``ValueError`` for a prompt that leaves no room for a response.
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


async def generate_group(
    group: PromptGroup,
    engine: Engine,
    sampling: SamplingParams,
    tokenizer: Detokenizer,
    *,
    n_samples: int,
    seed_of: SeedOf,
    max_context_len: int | None = None,
) -> PromptGroup:
    """A new group with ``n_samples`` generated, unscored samples of ``group``'s prompt, from one engine request.

    Sample k gets ``trajectory_id = group_index * n_samples + k``: unique over a run, since group indices are. Its text
    is decoded without special tokens; its mask is 1 on every generated token. Raises what ``fit_context`` and the
    engine raise.
    """
    request = GenerationRequest(
        prompt_ids=group.prompt.token_ids,
        seeds=tuple(seed_of(group.group_index, k) for k in range(n_samples)),
        sampling=fit_context(sampling, group.prompt, max_context_len),
    )
    generations = await engine.generate(request)
    assert len(generations) == n_samples, f"the engine gave {len(generations)} responses for {n_samples} seeds"
    first_id = group.group_index * n_samples
    samples = [_sample(group, first_id + k, generation, tokenizer) for k, generation in enumerate(generations)]
    return PromptGroup(group.group_index, group.prompt, samples)


def _sample(group: PromptGroup, trajectory_id: int, generation: Generation, tokenizer: Detokenizer) -> Sample:
    sample = Sample(
        prompt=group.prompt,
        group_index=group.group_index,
        trajectory_id=trajectory_id,
        response_ids=list(generation.token_ids),
        response=tokenizer.decode(generation.token_ids, skip_special_tokens=True),
        loss_mask=[1] * len(generation.token_ids),
        rollout_log_probs=list(generation.log_probs),
        status=STATUS[generation.finish_reason],
        weight_versions=generation.token_versions,
    )
    sample.check()
    return sample
