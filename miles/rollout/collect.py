"""The groups of an iteration, collected in bursts: generate, score, filter, and draw again until there are enough."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.base.threads import gather_or_cancel
from miles.config.rollout import RolloutArguments
from miles.rollout.filters import FilterStallGuard
from miles.rollout.groups import REWARD_ERROR, ProducedGroup
from miles.rollout.metrics import rollout_metrics
from miles.rollout.ordering import OrderingRule
from miles.tasks.data.conversations import Conversation
from miles.tasks.data.stream import NoPromptsLeft, TrainingStream
from miles.tasks.rewards.registry import passes_of
from miles.tasks.rewards.settings import RewardArguments
from miles.types.metrics import Metric
from miles.types.sample import PromptGroup, Sample, SampleStatus

ProduceGroup = Callable[[PromptGroup], Coroutine[Any, Any, ProducedGroup]]  # ``produce_group`` with its tools


def draw_up_to(n: int, stream: TrainingStream) -> list[PromptGroup]:
    """Return the next ``n`` prompts, or those that are left: a resumed run redraws prompts that it had not trained on.

    Raises:
        NoPromptsLeft: None is left.
    """
    try:
        return stream.draw(n)
    except NoPromptsLeft as error:
        if not error.left:
            raise
        return stream.draw(error.left)


def leaving_out_mastered(produce: ProduceGroup, stream: TrainingStream, rate: float) -> ProduceGroup:
    """Return ``produce``, after which ``stream`` leaves out the prompt if a fraction ``rate`` of trajectories passed.

    ScaleRL drops prompts at 0.9 (arXiv 2510.13786, no-positive-resampling).
    """

    async def produce_and_judge(drawn: PromptGroup) -> ProducedGroup:
        produced = await produce(drawn)
        if produced.drop_reason != REWARD_ERROR:
            passed = passes_of(produced.group)
            if sum(passed) / len(passed) >= rate:  # a product may round up: 0.55 * 20 is more than 11
                stream.leave_out(drawn.group_index)
        return produced

    return produce_and_judge


@dataclass(frozen=True)
class ScoredGroups:
    """The groups that an iteration is trained on, by ``group_index``, and its metrics.

    ``generated`` are all groups that were produced for it, also those that a filter has dropped; empty if these are the
    same.
    """

    groups: list[PromptGroup]
    metrics: dict[str, Metric]
    generated: Sequence[PromptGroup] = ()


Rollout = ScoredGroups  # the name that functions of --rollout-function-path use


class GroupCollector(ABC):
    """Collects the scored groups of one iteration after another.

    Args:
        stream: The prompts; None if none are drawn.
    """

    def __init__(self, stream: TrainingStream | None) -> None:
        self._stream = stream

    @abstractmethod
    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the groups and metrics of ``iteration``, counted from 0. Calls do not overlap.

        Raises:
            NoPromptsLeft: Too few prompts are left to fill it.
        """

    @property
    def progress(self) -> tuple[int, int] | None:
        """The groups of the iteration in progress that are ready, and how many a whole one has; None if not known."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts: a run that resumes there draws every prompt that is in no iteration.

        By default the stream's: between two iterations no group is in flight.
        """
        return {} if self._stream is None else self._stream.state()

    def weights_changed(self, version: int) -> None:
        """Note that the engine generates with weights of ``version`` from now on. Does nothing by default."""
        return None


@dataclass
class Tally:
    """The groups that were produced for one iteration, and what happened to them."""

    generated: list[PromptGroup] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    reward_errors: int = 0

    def add(self, produced: ProducedGroup) -> None:
        """Count one group."""
        self.generated.append(produced.group)
        self.reward_errors += produced.reward_errors
        if produced.drop_reason is not None:
            self.dropped[produced.drop_reason] += 1

    def metrics(self, groups: Iterable[PromptGroup], log_passrate: bool) -> dict[str, Metric]:
        """Return ``rollout/…`` of an iteration that trains on ``groups``, with ``rollout/dropped/<reason>``."""
        metrics = rollout_metrics(list(groups), self.generated, self.reward_errors, log_passrate)
        return metrics | {
            f"rollout/dropped/{reason}": Metric(count, 1.0) for reason, count in sorted(self.dropped.items())
        }


class BurstCollector(GroupCollector):
    """Collects ``--rollout-batch-size`` groups by awaiting every group it starts (``LeftoverGroups.AWAIT``).

    Prompts are submitted in bursts, all groups of a burst at once; a group is scored as soon as it is generated.
    Without a filter one burst is the iteration. With a filter, bursts of ``--over-sampling-batch-size`` prompts follow
    one another until enough groups are kept.

    Seeds and weights alone decide which groups are kept: a burst is always awaited to its end, and the first groups by
    ``group_index`` form the iteration. Surplus groups are discarded and counted (``rollout/surplus_groups``); in the
    next iteration they would be off-policy. ``StreamCollector`` does not wait.
    """

    _stream: TrainingStream

    def __init__(
        self,
        stream: TrainingStream,
        produce: ProduceGroup,
        rollout: RolloutArguments,
        reward: RewardArguments,
        rule: OrderingRule,
    ) -> None:
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        super().__init__(stream)
        path = rollout.dynamic_sampling_filter_path
        self._produce = produce
        self._log_passrate = reward.log_passrate
        self._batch_size = rollout.rollout_batch_size
        self._ready = 0
        self._burst_size = rule.most_groups
        self._guard = (
            FilterStallGuard(stream, path, self._burst_size, self._batch_size) if path or reward.drops_errors else None
        )

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the groups and metrics of ``iteration``, counted from 0.

        Raises:
            NoPromptsLeft: Too few prompts are left to fill it.
            ValueError: The filter keeps almost nothing (``FilterStallGuard``).
            Exception: Whatever generation, the reward function and the filter raise.
        """
        collected: list[PromptGroup] = []
        tally = Tally()
        self._ready = 0
        while len(collected) < self._batch_size:
            drawn = draw_up_to(self._burst_size, self._stream)  # by group_index, like everything that follows
            for produced in await gather_or_cancel(self._counted(group) for group in drawn):
                tally.add(produced)
                if produced.drop_reason is None:
                    collected.append(produced.group)
                if self._guard is not None:
                    self._guard.count(passed=produced.drop_reason is None)
            if self._guard is not None:
                self._guard.check(iteration, len(collected), tally.dropped)
        groups = collected[: self._batch_size]
        metrics = tally.metrics(groups, self._log_passrate)
        if self._guard is not None:
            metrics["rollout/surplus_groups"] = Metric(len(collected) - len(groups), 1.0)
        return ScoredGroups(groups, metrics, tuple(tally.generated))

    async def _counted(self, group: PromptGroup) -> ProducedGroup:
        produced = await self._produce(group)
        self._ready += produced.drop_reason is None
        return produced

    @property
    def progress(self) -> tuple[int, int]:
        """As in ``GroupCollector``."""
        return min(self._ready, self._batch_size), self._batch_size


# Iterations of conversations, for ``--loss-type sft_loss``: nothing is generated or scored.


class ConversationCollector(GroupCollector):
    """Draws conversations: each is a group of one sample."""

    _stream: TrainingStream

    def __init__(self, stream: TrainingStream, batch_size: int) -> None:
        """``stream`` draws conversations, ``batch_size`` of them per iteration."""
        super().__init__(stream)
        self._batch_size = batch_size

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the next conversations, and their lengths as metrics."""
        groups = [self._group(drawn) for drawn in self._stream.draw(self._batch_size)]
        samples = [sample for group in groups for sample in group.samples]
        metrics = {
            "prompt_length": Metric.mean(len(s.prompt.token_ids) for s in samples),
            "response_length": Metric.mean(len(s.response_ids) for s in samples),
            "loss_tokens": Metric(sum(s.num_loss_tokens for s in samples), 1.0),
            "tokens": Metric(sum(len(s.response_ids) for s in samples), 1.0),
        }
        return ScoredGroups(groups, {f"rollout/{name}": metric for name, metric in metrics.items()})

    def _group(self, drawn: PromptGroup) -> PromptGroup:
        conversation = drawn.prompt
        assert isinstance(conversation, Conversation), "the stream is one of conversations"
        sample = Sample(
            conversation.prompt,
            drawn.group_index,
            trajectory_id=drawn.group_index,
            response_ids=list(conversation.response_ids),
            response=conversation.response,
            loss_mask=list(conversation.loss_mask),
            rollout_log_probs=[0.0] * len(conversation.response_ids),  # nothing sampled them, and the loss reads none
            status=SampleStatus.COMPLETED,
        )
        return PromptGroup(drawn.group_index, sample.prompt, [sample])
