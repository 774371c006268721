"""The step that is rehearsed: every response has the assumed length, and micro-batches are cut as in a run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.config.settings import Settings
from miles.objective.aggregation import AggregationFlags
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch, TrainShard

PROMPT = 512  # tokens, if neither flag says how many


def prompt_length(settings: Settings) -> int:
    """Return the assumed tokens of a prompt. Without a flag, a short context is mostly left to the response."""
    given, longest = settings.rehearsal, settings.data.rollout_max_prompt_len
    if given.rehearse_prompt_len is not None:
        return given.rehearse_prompt_len
    context = settings.rollout.rollout_max_context_len
    if context is not None and given.rehearse_response_len is not None:
        return min(PROMPT, longest or PROMPT, context - given.rehearse_response_len)
    return min(PROMPT, longest or (PROMPT if context is None else max(1, context // 4)))


def response_length(settings: Settings) -> int:
    """Return the assumed tokens of a response: the longest that the limits of a response and of a sequence allow."""
    length = settings.rehearsal.rehearse_response_len or settings.rollout.rollout_max_response_len
    assert length is not None, "check_rehearsal() requires one of the two"
    context = settings.rollout.rollout_max_context_len
    return length if context is None else min(length, context - prompt_length(settings))


def step_of_one_rank(settings: Settings) -> TrainShard:
    """Schedule what one replica trains on in a step, and return the shard of its first rank.

    Replicas are alike, since all samples are equally long. Under dynamic context parallelism the whole step is
    scheduled, because its micro-batches use all ranks.
    """
    dims, per_prompt = settings.dims, settings.rollout.n_samples_per_prompt
    whole = settings.parallel.dynamic_context_parallel
    replicas = 1 if whole else dims.replicas
    samples = max(1, -(-settings.global_batch_size // replicas))
    batch = _batch(samples, per_prompt, prompt_length(settings), response_length(settings), settings.loss)
    ranks = dims.token_ranks if whole else dims.context_parallel_size
    share = not (settings.megatron.mtp_heads or settings.rollout.use_rollout_routing_replay)  # as ShardBuilder does
    shard = schedule_step(batch, ranks, settings.training, settings.parallel, share_prompts=share)[0]
    columns = [np.zeros(length, np.float32) for length in batch.select(range(len(shard.batch))).response_lengths]
    is_shown = settings.loss.rollout_data_postprocess_path is not None  # it may change both
    has_old = settings.steps_per_iteration > 1 or is_shown or build_objective(settings.loss).needs.old_log_probs
    scored = replace(
        shard.batch,
        old_log_probs=columns if has_old or settings.loss.use_rollout_logprobs else None,
        tis_mean=1.0 if settings.loss.tis_batch_normalize else None,
        ref_log_probs=columns if settings.loss.needs_reference else None,
        values=columns if settings.loss.has_critic else None,
        returns=columns if settings.loss.has_critic else None,
        advantages=columns if settings.loss.estimates_by_token or is_shown else None,
        selected=columns if build_objective(settings.loss).selects_tokens else None,
        top_entropy=columns if build_objective(settings.loss).ranks_entropies else None,
    )
    return replace(shard, batch=scored)


@lru_cache(maxsize=2)  # most changes that are tried have the same samples
def _batch(samples: int, per_prompt: int, prompt_tokens: int, response_tokens: int, given: LossArguments) -> TrainBatch:
    """Convert samples to what a replica trains on.

    The converter gets responses of one token, and its columns are made longer afterwards: numbers that are all alike
    need no lists.
    """
    default = AggregationFlags()  # the sample mean: the groups of a replica need not be whole
    loss = replace(given, loss_aggregation=default.loss_aggregation, loss_aggregation_divisor=None)
    (batch,) = convert(_groups(samples, per_prompt), loss=loss, global_batch_size=samples)
    ones, zeros = np.ones(response_tokens, np.float32), np.zeros(response_tokens, np.float32)
    tokens = np.zeros((samples, prompt_tokens + response_tokens), np.int64)
    for i, row in enumerate(tokens):
        _write_digits(i // per_prompt, row[:prompt_tokens])
        _write_digits(i % per_prompt, row[prompt_tokens:])
    return replace(
        batch,
        tokens=[*tokens],
        response_lengths=[response_tokens] * samples,
        loss_masks=[ones] * samples,
        rollout_log_probs=[zeros] * samples,
        teacher_log_probs=None if batch.teacher_log_probs is None else [zeros] * samples,
        sample_denoms=[float(response_tokens)] * samples,
        trajectory_token_counts=[float(response_tokens)] * samples,
        num_loss_tokens=samples * response_tokens,
    )


def _groups(samples: int, per_prompt: int) -> list[PromptGroup]:
    """Return groups of samples with one token each."""
    groups = []
    for index, first in enumerate(range(0, samples, per_prompt)):
        prompt = Prompt("", (0,))
        made = [
            Sample(prompt, index, i, [0], "", [1], [0.0], teacher_log_probs=[0.0], reward=float(i % 2))
            for i in range(first, min(first + per_prompt, samples))
        ]
        groups.append(PromptGroup(index, prompt, made, baseline_reward=0.5))
    return groups


def _write_digits(number: int, row: np.ndarray) -> None:
    """Write token ids that any vocabulary has: the hexadecimal digits of ``number``, the last first.

    So prompts, and the responses to one, share at most their first few tokens.
    """
    digits = [int(digit, 16) for digit in reversed(f"{number:x}")][: len(row)]
    row[: len(digits)] = digits
