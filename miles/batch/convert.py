"""From scored groups to train batches. Whatever needs to see a whole step or group is computed here, before any split.

Rewards are normalized over whole groups before steps are cut; denominators are computed over whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from miles.objective.aggregation import needs_whole_groups, step_denominators
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.settings import LossArguments
from miles.types.sample import PromptGroup, Sample
from miles.types.token_sets import TokenSets
from miles.types.train_batch import TrainBatch

Supports = Literal["left out", "if given", "required"]
AdvantagesOf = Callable[[Sequence[Sample]], list[float]]  # one finite number per sample


@dataclass(frozen=True)
class _Row:
    """One sample, with what the batch holds next to it."""

    sample: Sample
    trajectory_id: int
    reward: float


def convert(
    groups: Sequence[PromptGroup],
    *,
    loss: LossArguments,
    global_batch_size: int | None,
    advantages_of: AdvantagesOf | None = None,
    reward_weights: Mapping[str, float] = MappingProxyType({}),
    supports: Supports = "if given",
    with_experts: bool = False,
) -> list[TrainBatch]:
    """Return one ``TrainBatch`` per optimizer step.

    Steps are cut in group order. A trajectory (all samples of one ``trajectory_id``) is never cut; the last step takes
    what remains. A trajectory that ``--reward-error drop`` has removed still counts when steps are cut: its step is
    smaller by one, and the other steps do not change.

    Args:
        groups: The scored groups of an iteration.
        loss: The flags of the objective.
        global_batch_size: N, the number of trajectories of a step; None: one step of all of them.
        advantages_of: Makes the advantages of phase 1, in the place of the estimator.
        reward_weights: The weight of each reward by name, if there are several.
        supports: What to do with the supports of samples: leave them out, take them if samples have any, or require
            them, as in a run that generates with top-p, top-k or min-p.
        with_experts: Whether to take the experts that the engine's routers chose.

    Raises:
        ValueError: A group that the aggregation or the estimator needs whole would be cut in two, a reward is not
            finite, the columns of a sample differ in length, or a sample lacks a support or experts that it must have.
    """
    trajectories = _with_dropped(groups, _trajectories(groups, loss, advantages_of, reward_weights))
    global_batch_size = max(1, len(trajectories)) if global_batch_size is None else global_batch_size
    assert global_batch_size >= 1
    cut = [trajectories[i : i + global_batch_size] for i in range(0, len(trajectories), global_batch_size)]
    steps = [[trajectory for trajectory in step if trajectory is not None] for step in cut]
    if not all(steps):
        if any(group.unconverted_trajectories for group in groups):
            raise ValueError(
                "--custom-convert-samples-to-train-data-path: it returned no row for any trajectory of an optimizer "
                "step that the reward function scored, so there is nothing to train on; return rows for more of them, "
                "or raise --global-batch-size"
            )
        raise ValueError(
            "--reward-error drop: the reward function failed on every trajectory of an optimizer step, so there is "
            "nothing to train on; correct the reward function, or raise --global-batch-size"
        )
    whole_for = _whole_groups_for(loss)
    if whole_for is not None:
        _check_groups_whole(steps, groups, global_batch_size, *whole_for)
    if loss.drop_zero_std_groups:
        steps = _without_zero_std(steps)
    used = supports == "required" or (
        supports == "if given" and any(s.support is not None for group in groups for s in group.samples)
    )
    batches = [_train_batch([row for trajectory in step for row in trajectory], loss, used) for step in steps]
    if not with_experts:
        return batches
    made = zip(batches, steps, strict=True)
    return [replace(batch, experts=_experts([row for t in step for row in t])) for batch, step in made]


def _trajectories(
    groups: Sequence[PromptGroup],
    loss: LossArguments,
    advantages_of: AdvantagesOf | None,
    reward_weights: Mapping[str, float],
) -> list[list[_Row]]:
    """Return the rows of each trajectory, in the order of groups and of the trajectory's first sample."""
    samples = [sample for group in groups for sample in group.samples]
    trajectory_ids = [_checked_trajectory_id(sample) for sample in samples]
    group_indices, loss_tokens = [s.group_index for s in samples], [s.num_loss_tokens for s in samples]
    rewards = SampleRewards(
        _raw_rewards(groups, loss),
        group_indices,
        trajectory_ids,
        loss_tokens,
        parts=[sample.reward_parts for sample in samples],
        part_weights=reward_weights,
        baselines=_baselines(groups),
    )
    given = [sample.advantage for sample in samples if sample.advantage is not None]
    if given:
        assert len(given) == len(samples), "--custom-convert-samples-to-train-data-path makes every sample"
        advantages = given
    elif advantages_of is not None:
        advantages = advantages_of(samples)
    else:
        advantages = build_objective(loss).sample_advantages(rewards)
    trajectories: dict[int, list[_Row]] = {}
    for row in map(_Row, samples, trajectory_ids, advantages):
        trajectories.setdefault(row.trajectory_id, []).append(row)
    for trajectory_id, rows in trajectories.items():
        owners = {row.sample.group_index for row in rows}
        assert len(owners) == 1, f"trajectory {trajectory_id} is in the prompt groups {sorted(owners)}"
    return list(trajectories.values())


def _with_dropped(groups: Sequence[PromptGroup], trajectories: list[list[_Row]]) -> list[list[_Row] | None]:
    """Return the trajectories with a None for each that was dropped, at the end of its group."""
    by_group: dict[int, list[list[_Row] | None]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory[0].sample.group_index, []).append(trajectory)
    for group in groups:
        by_group.setdefault(group.group_index, []).extend([None] * group.dropped_trajectories)
    return [trajectory for of_group in by_group.values() for trajectory in of_group]


def _without_zero_std(steps: list[list[list[_Row]]]) -> list[list[list[_Row]]]:
    """Return the steps without the groups whose advantages are all 0; a step that has no others keeps them."""
    rows = (row for step in steps for trajectory in step for row in trajectory)
    found = {row.sample.group_index for row in rows if row.reward != 0.0}
    return [[trajectory for trajectory in step if trajectory[0].sample.group_index in found] or step for step in steps]


def _checked_trajectory_id(sample: Sample) -> int:
    sample.check()
    assert sample.trajectory_id is not None, f"a sample of group {sample.group_index} has no trajectory_id"
    return sample.trajectory_id


def _raw_rewards(groups: Sequence[PromptGroup], loss: LossArguments) -> list[float]:
    if not loss.type.uses_advantages:  # rewards are not read, and samples need not have any
        return [0.0 for group in groups for _ in group.samples]
    return [reward for group in groups for reward in group.rewards]


def _baselines(groups: Sequence[PromptGroup]) -> list[float]:
    """Return the greedy reward of each sample's prompt; nothing if they were not generated."""
    found = [group.baseline_reward for group in groups for _ in group.samples]
    return [baseline for baseline in found if baseline is not None] if None not in found else []


def _whole_groups_for(loss: LossArguments) -> tuple[str, str, str] | None:
    """Return the flag that asks for steps of whole groups, its value, and what would be lost; None if none does."""
    if needs_whole_groups(loss):
        return "--loss-aggregation", loss.loss_aggregation, "mean"
    if loss.type.uses_advantages and build_objective(loss).estimator.reads_score_norms:
        return "--advantage-estimator", loss.advantage_estimator, "baseline"
    return None


def _check_groups_whole(
    steps: Sequence[Sequence[Sequence[_Row]]],
    groups: Sequence[PromptGroup],
    global_batch_size: int,
    flag: str,
    value: str,
    lost: str,
) -> None:
    step_of_group: dict[int, int] = {}
    for number, step in enumerate(steps):
        for trajectory in step:
            group_index = trajectory[0].sample.group_index
            if step_of_group.setdefault(group_index, number) == number:
                continue
            size = next(num_trajectories(g) for g in groups if g.group_index == group_index)
            raise ValueError(
                f"{flag} {value} with --global-batch-size {global_batch_size}: a step would cut prompt "
                f"group {group_index} of {size} trajectories in two, and its {lost} would be lost; give a "
                f"--global-batch-size at which steps end where groups end ({_group_sizes(groups)}), or use another "
                f"{flag}"
            )


def num_trajectories(group: PromptGroup) -> int:
    """Return how many trajectories a group has, with those that were dropped."""
    return len({sample.trajectory_id for sample in group.samples}) + group.dropped_trajectories


def _group_sizes(groups: Sequence[PromptGroup]) -> str:
    sizes = {num_trajectories(group) for group in groups}
    if len(sizes) == 1:
        return f"a multiple of {sizes.pop()}"
    return f"here they have {min(sizes)} to {max(sizes)} trajectories; one step for all of them is always possible"


def _train_batch(rows: Sequence[_Row], loss: LossArguments, with_supports: bool) -> TrainBatch:
    samples = [row.sample for row in rows]
    masks = [sample.trained_mask for sample in samples]  # advantages are made: removed samples have counted for them
    group_indices = [s.group_index for s in samples]
    trajectory_ids = [row.trajectory_id for row in rows]
    denominators = step_denominators(
        loss.loss_aggregation,
        token_counts=[sum(mask) for mask in masks],
        trajectory_ids=trajectory_ids,
        group_indices=group_indices,
        divisor=loss.loss_aggregation_divisor,
        alpha=loss.loss_aggregation_alpha,
    )
    return TrainBatch(
        tokens=[np.asarray(s.tokens, dtype=np.int64) for s in samples],
        response_lengths=[len(s.response_ids) for s in samples],
        loss_masks=[np.asarray(mask, dtype=np.float32) for mask in masks],
        rollout_log_probs=[np.asarray(s.rollout_log_probs, dtype=np.float32) for s in samples],
        teacher_log_probs=_teacher_log_probs(samples) if loss.teacher_is_served else None,
        rewards=[row.reward for row in rows],
        group_indices=group_indices,
        trajectory_ids=trajectory_ids,
        position_in_step=list(range(len(rows))),
        supports=_supports(samples) if with_supports else None,
        **vars(denominators),
    )


def _teacher_log_probs(samples: Sequence[Sample]) -> list[np.ndarray]:
    for sample in samples:
        if len(sample.teacher_log_probs) != sample.response_length:
            raise ValueError(
                f"--opd-type server: trajectory {sample.trajectory_id} of group {sample.group_index} has no log-probs "
                "of the teacher; saved samples have them if their run had --opd-type server, and samples of your own "
                "need teacher_log_probs, one per response token"
            )
    return [np.asarray(sample.teacher_log_probs, dtype=np.float32) for sample in samples]


def _supports(samples: Sequence[Sample]) -> list[TokenSets]:
    """Return the support of every sample. One without loss tokens needs none: it gets the whole vocabulary."""
    vocab_size = next((sample.support.vocab_size for sample in samples if sample.support is not None), 1)
    found = []
    for sample in samples:
        if sample.support is None and any(sample.loss_mask):
            raise ValueError(
                f"trajectory {sample.trajectory_id} of group {sample.group_index} does not say which tokens top-p, "
                "top-k and min-p have kept, so the trainer cannot compute log-probs over them; samples of your own "
                "take the support of the engine's generation, and saved samples have it if their run sampled so; or "
                "add --no-support-replay"
            )
        whole = TokenSets.whole(vocab_size, sample.response_length)
        found.append(whole if sample.support is None else sample.support)
    return found


def _experts(rows: Sequence[_Row]) -> list[np.ndarray]:
    """Return the engine's experts of every sample, up to the token before its last loss token at least."""
    found = []
    shape = next((row.sample.experts.shape[1:] for row in rows if row.sample.experts is not None), (0, 0))
    for sample in (row.sample for row in rows):
        mask = sample.trained_mask
        needed = len(sample.tokens) - 1 - (mask[::-1].index(1) if 1 in mask else len(mask))
        given = np.zeros((0, *shape), np.uint8) if sample.experts is None else sample.experts
        if (1 in mask and len(given) < needed) or given.shape[1:] != shape:
            raise ValueError(
                f"--use-rollout-routing-replay: trajectory {sample.trajectory_id} of group {sample.group_index} does "
                f"not say which experts the engine chose for {needed} tokens; samples of your own take the experts of "
                "the engine's generation, and saved samples have them if their run replayed them"
            )
        found.append(given)
    return found
