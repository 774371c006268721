"""Groups until a rollout is full: generate, score, filter, refill."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.engine.base import Engine
from miles.rewards.base import RewardFunction
from miles.rewards.scoring import score
from miles.rollout.concurrency import gather_or_cancel
from miles.rollout.filters import load_group_filter
from miles.rollout.generate import Detokenizer, generate_group, response_seed, sampling_params
from miles.rollout.rollout_metrics import rollout_metrics
from miles.sample import PromptGroup
from miles.tracking.metrics import Metric

MIN_BARREN_BURSTS = 10  # a small prompt set is passed quickly: give chance a few tries
MAX_BARREN_BURSTS = 100  # a large one never is: stop all the same


class PromptSource(Protocol):
    """Prompts, drawn by rising ``group_index``. ``epoch``: the pass that the last drawn one belongs to."""

    @property
    def epoch(self) -> int: ...

    def draw(self, n: int) -> list[PromptGroup]: ...


@dataclass(frozen=True)
class Rollout:
    """The groups to train on, by ``group_index``, and what there is to say about them."""

    groups: list[PromptGroup]
    metrics: dict[str, Metric]


@dataclass
class _Progress:
    """One rollout under way."""

    kept: list[PromptGroup] = field(default_factory=list)
    generated: list[PromptGroup] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    reward_errors: int = 0
    barren_bursts: int = 0  # bursts in a row of which nothing was kept, up to now
    barren_since_epoch: int = 0  # the epoch in which the first of them was drawn


class Collector:
    """Collects rollouts of ``--rollout-batch-size`` scored groups.

    Prompts are submitted in bursts, all groups of a burst at once; each group is scored as soon as it is generated.
    Without a filter one burst is the rollout. With one, bursts of ``--over-sampling-batch-size`` prompts follow one
    another until enough groups are kept.

    Which groups are kept depends on the seeds and weights only, never on which response came first: a burst is always
    awaited to its end, and the first groups by ``group_index`` make the rollout. Surplus groups are discarded and
    counted (``rollout/surplus_groups``) rather than kept for the next rollout, where they would be off-policy.
    """

    def __init__(
        self,
        stream: PromptSource,
        engine: Engine,
        tokenizer: Detokenizer,
        reward_function: RewardFunction,
        rollout: RolloutArguments,
        reward: RewardArguments,
        seed: int,
    ) -> None:
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        path = rollout.dynamic_sampling_filter_path
        self._stream = stream
        self._reward_function = reward_function
        self._rollout = rollout
        self._reward = reward
        self._batch_size = rollout.rollout_batch_size
        self._filter = load_group_filter(path) if path else None
        self._burst_size = (rollout.over_sampling_batch_size or self._batch_size) if path else self._batch_size
        self._generate = partial(
            generate_group,
            engine=engine,
            sampling=sampling_params(rollout),
            tokenizer=tokenizer,
            n_samples=rollout.n_samples_per_prompt,
            seed_of=partial(response_seed, seed),
            max_context_len=rollout.rollout_max_context_len,
        )

    async def collect(self, rollout_id: int) -> Rollout:
        """The groups and metrics of rollout ``rollout_id``, counted from 0.

        Truncated and aborted samples are kept as such, and scored like the others. Raises ``ValueError`` when the
        filter keeps nothing over a whole pass of the prompts (of ``MIN_BARREN_BURSTS`` or more) or over
        ``MAX_BARREN_BURSTS``, and what generation and scoring raise.
        """
        progress = _Progress()
        while len(progress.kept) < self._batch_size:
            await self._run_burst(progress)
            self._check_not_barren(progress, rollout_id)
        groups = progress.kept[: self._batch_size]
        metrics = rollout_metrics(groups, progress.generated, progress.reward_errors, self._reward.log_passrate)
        if self._filter is not None:
            metrics["rollout/surplus_groups"] = Metric(len(progress.kept) - len(groups), 1.0)
        for reason, count in sorted(progress.dropped.items()):
            metrics[f"rollout/dropped/{reason}"] = Metric(count, 1.0)
        return Rollout(groups, metrics)

    async def _run_burst(self, progress: _Progress) -> None:
        epoch, kept_before = self._stream.epoch, len(progress.kept)
        drawn = self._stream.draw(self._burst_size)  # in the order of group_index, as everything from here on
        for group, errors in await gather_or_cancel(self._generate_and_score(group) for group in drawn):
            progress.generated.append(group)
            progress.reward_errors += errors
            decision = self._filter(group) if self._filter is not None else None
            if decision is None or decision.keep:
                progress.kept.append(group)
            else:
                progress.dropped[decision.reason] += 1
        if len(progress.kept) > kept_before:
            progress.barren_bursts = 0
            return
        if progress.barren_bursts == 0:
            progress.barren_since_epoch = epoch
        progress.barren_bursts += 1

    async def _generate_and_score(self, drawn: PromptGroup) -> tuple[PromptGroup, int]:
        group = await self._generate(drawn)
        errors = await score(group.samples, self._reward_function, self._reward.reward_error_value)
        return group, errors

    def _check_not_barren(self, progress: _Progress, rollout_id: int) -> None:
        """Stop a filter that will never be satisfied: nothing kept over a whole pass, or over very many bursts."""
        # The stretch began somewhere within its first epoch, so the one after it is the first that it saw whole.
        saw_whole_pass = self._stream.epoch >= progress.barren_since_epoch + 2
        bursts = progress.barren_bursts
        if bursts < MIN_BARREN_BURSTS or not (saw_whole_pass or bursts >= MAX_BARREN_BURSTS):
            return
        drops = ", ".join(f"{count} {reason}" for reason, count in progress.dropped.most_common())
        raise ValueError(
            f"--dynamic-sampling-filter-path {self._rollout.dynamic_sampling_filter_path}: rollout {rollout_id} has "
            f"{len(progress.kept)} of {self._batch_size} groups, and the last {bursts} bursts of {self._burst_size} "
            f"prompts brought none (dropped in all: {drops}); check the reward, give prompts that the model solves "
            f"sometimes, raise --n-samples-per-prompt, or leave the filter out"
        )
