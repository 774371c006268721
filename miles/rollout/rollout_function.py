"""The user's own way to make a rollout: ``--rollout-function-path``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.engine.base import Engine
from miles.import_path import load_function
from miles.rewards.base import RewardFunction
from miles.rollout.collect import PromptSource, Rollout
from miles.rollout.produce_group import GroupMaker
from miles.rollout.rollout_metrics import rollout_metrics
from miles.sample import PromptGroup

_FLAG = "--rollout-function-path"


@dataclass(frozen=True)
class RolloutTools:
    """What a rollout function has to work with.

    ``stream.draw(n)`` gives n prompts; ``make_group(drawn)`` awaits one scored group of ``--n-samples-per-prompt``
    samples, as the built-in collector makes it; the rest is for those who do that themselves.
    """

    stream: PromptSource
    make_group: GroupMaker
    engine: Engine
    tokenizer: Any
    reward_function: RewardFunction
    rollout: RolloutArguments
    reward: RewardArguments


class RolloutFunction(Protocol):
    """The scored groups of one rollout, ``--rollout-batch-size`` of them; or a ``Rollout``, with metrics of its own."""

    async def __call__(self, iteration: int, tools: RolloutTools) -> list[PromptGroup] | Rollout: ...


class FunctionCollector:
    """A ``RolloutSource`` that asks the user's function. Raises ``ValueError`` if the path cannot be imported."""

    def __init__(self, path: str, tools: RolloutTools) -> None:
        self._path = path
        self._tools = tools
        self._function: RolloutFunction = load_function(path, _FLAG)

    async def collect(self, iteration: int) -> Rollout:
        """What the function gives, checked: ``ValueError`` says what is wrong with it."""
        answer: Any = await self._function(iteration, self._tools)
        groups = answer.groups if isinstance(answer, Rollout) else answer
        self._check(groups, iteration)
        metrics = rollout_metrics(groups, groups, 0, self._tools.reward.log_passrate)
        return Rollout(groups, metrics | answer.metrics if isinstance(answer, Rollout) else metrics)

    def state(self) -> dict[str, Any]:
        """Between two rollouts a function is expected to hold no prompts back."""
        return self._tools.stream.state()

    def weights_arrived(self, version: int) -> None:
        """Each rollout is generated with the weights that are there."""

    def _check(self, groups: Any, iteration: int) -> None:
        at = f"{_FLAG} {self._path}: rollout {iteration}"
        if not isinstance(groups, list) or not all(isinstance(group, PromptGroup) for group in groups):
            raise ValueError(f"{at} is {groups!r:.80}; return a list of miles.sample.PromptGroup, or a Rollout of it")
        wanted, per_group = self._tools.rollout.rollout_batch_size, self._tools.rollout.n_samples_per_prompt
        if len(groups) != wanted:
            raise ValueError(f"{at} has {len(groups)} groups; return as many as --rollout-batch-size {wanted}")
        for group in groups:
            trajectories = {sample.trajectory_id for sample in group.samples}
            if len(trajectories) != per_group or None in trajectories:
                raise ValueError(
                    f"{at}: group {group.group_index} has the trajectory_ids {sorted(map(str, trajectories))}; give it "
                    f"--n-samples-per-prompt {per_group} trajectories, each with an id of its own"
                )
            if any(sample.reward is None for sample in group.samples):
                raise ValueError(f"{at}: group {group.group_index} has samples without a reward; score every sample")
            for sample in group.samples:
                sample.check()
