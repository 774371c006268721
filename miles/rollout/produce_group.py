"""From a drawn prompt to a group that can be trained on: generate, score, judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.engine.base import Engine
from miles.metrics import Metric
from miles.rewards.base import RewardFunction
from miles.rewards.scoring import score
from miles.rollout.filters import load_group_filter
from miles.rollout.generate import Detokenizer, GroupGenerator, generate_group, response_seed, sampling_params
from miles.rollout.rollout_metrics import rollout_metrics
from miles.sample import PromptGroup


@dataclass(frozen=True)
class MadeGroup:
    """A generated and scored group. ``drop_reason`` is None for one that the filter keeps."""

    group: PromptGroup
    reward_errors: int = 0
    drop_reason: str | None = None


class GroupMaker:
    """Makes one group of a drawn prompt; many calls run at once. Raises what generation, reward and filter raise."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Detokenizer,
        reward_function: RewardFunction,
        rollout: RolloutArguments,
        reward: RewardArguments,
        seed: int,
        generate: GroupGenerator = generate_group,
    ) -> None:
        path = rollout.dynamic_sampling_filter_path
        self._filter = load_group_filter(path) if path else None
        self._reward_function = reward_function
        self._reward_error_value = reward.reward_error_value
        self._generate = partial(
            generate,
            engine=engine,
            sampling=sampling_params(rollout),
            tokenizer=tokenizer,
            n_samples=rollout.n_samples_per_prompt,
            seed_of=partial(response_seed, seed),
            max_context_len=rollout.rollout_max_context_len,
        )

    async def __call__(self, drawn: PromptGroup) -> MadeGroup:
        """Truncated and aborted samples are kept as such, and scored like the others."""
        group = await self._generate(drawn)
        errors = await score(group.samples, self._reward_function, self._reward_error_value)
        decision = self._filter(group) if self._filter is not None else None
        return MadeGroup(group, errors, None if decision is None or decision.keep else decision.reason)


@dataclass
class Tally:
    """What was generated for one rollout, and what became of it."""

    generated: list[PromptGroup] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    reward_errors: int = 0

    def add(self, made: MadeGroup) -> None:
        """Count one group."""
        self.generated.append(made.group)
        self.reward_errors += made.reward_errors
        if made.drop_reason is not None:
            self.dropped[made.drop_reason] += 1

    def metrics(self, kept: Iterable[PromptGroup], log_passrate: bool) -> dict[str, Metric]:
        """``rollout/…`` of a rollout that trains on ``kept``, and ``rollout/dropped/<reason>``."""
        metrics = rollout_metrics(list(kept), self.generated, self.reward_errors, log_passrate)
        return metrics | {
            f"rollout/dropped/{reason}": Metric(count, 1.0) for reason, count in sorted(self.dropped.items())
        }
