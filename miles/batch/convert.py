"""From scored groups to train batches. Whatever needs to see a whole step or group is computed here, before any split.

Rewards are normalized over whole groups before steps are cut; denominators are computed over whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from miles.base.user_code import load_function
from miles.config.functions import flags_view
from miles.config.settings import Settings
from miles.objective.aggregation import needs_whole_groups, step_denominators
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.hooks import DATA_POSTPROCESS
from miles.objective.settings import LossArguments
from miles.types.replay import TokenSets
from miles.types.sample import PromptGroup, Sample
from miles.types.train_batch import TrainBatch, TrainShard

if TYPE_CHECKING:
    import torch

    from miles.types.images import ImageTensors

Supports = Literal["left out", "if given", "required"]
AdvantagesOf = Callable[[Sequence[Sample]], list[float]]  # one finite number per sample


@dataclass(frozen=True)
class _Row:
    """One sample, with its other columns of the batch."""

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
        advantages_of: Makes the advantages of phase 1, instead of the estimator.
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
    with_supports = supports == "required" or (
        supports == "if given" and any(s.support is not None for group in groups for s in group.samples)
    )
    flat = ([row for trajectory in step for row in trajectory] for step in steps)
    return [_train_batch(rows, loss, with_supports, with_experts) for rows in flat]


def _trajectories(
    groups: Sequence[PromptGroup],
    loss: LossArguments,
    advantages_of: AdvantagesOf | None,
    reward_weights: Mapping[str, float],
) -> list[list[_Row]]:
    """Return the rows of each trajectory, in the order of groups and of the trajectory's first sample."""
    samples = [sample for group in groups for sample in group.samples]
    trajectory_ids = [_checked_trajectory_id(sample) for sample in samples]
    rewards = SampleRewards(
        _raw_rewards(groups, loss),
        [sample.group_index for sample in samples],
        trajectory_ids,
        [sample.num_loss_tokens for sample in samples],
        parts=[sample.reward_parts for sample in samples],
        part_weights=reward_weights,
        baselines=_baselines(groups),
    )
    preset = [sample.advantage for sample in samples if sample.advantage is not None]
    if preset:
        assert len(preset) == len(samples), "--custom-convert-samples-to-train-data-path makes every sample"
        advantages = preset
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
    groups = {row.sample.group_index for row in rows if row.reward != 0.0}
    return [[trajectory for trajectory in step if trajectory[0].sample.group_index in groups] or step for step in steps]


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
    baselines = [group.baseline_reward for group in groups for _ in group.samples]
    return [baseline for baseline in baselines if baseline is not None] if None not in baselines else []


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


def _train_batch(rows: Sequence[_Row], loss: LossArguments, with_supports: bool, with_experts: bool) -> TrainBatch:
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
        experts=_experts(samples) if with_experts else None,
        images=_images(samples) if any(s.prompt.images is not None for s in samples) else None,
        **vars(denominators),
    )


def _images(samples: Sequence[Sample]) -> list[ImageTensors | None]:
    from miles.models.images import tensors_of

    return [None if s.prompt.images is None else tensors_of(s.prompt.images) for s in samples]


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
    supports = []
    for sample in samples:
        if sample.support is None and any(sample.loss_mask):
            raise ValueError(
                f"trajectory {sample.trajectory_id} of group {sample.group_index} does not say which tokens top-p, "
                "top-k and min-p have kept, so the trainer cannot compute log-probs over them; samples of your own "
                "take the support of the engine's generation, and saved samples have it if their run sampled so; or "
                "add --no-support-replay"
            )
        whole = TokenSets.whole(vocab_size, sample.response_length)
        supports.append(whole if sample.support is None else sample.support)
    return supports


def _experts(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Return the engine's experts of every sample, up to the token before its last loss token at least."""
    experts = []
    shape = next((sample.experts.shape[1:] for sample in samples if sample.experts is not None), (0, 0))
    for sample in samples:
        mask = sample.trained_mask
        needed = len(sample.tokens) - 1 - (mask[::-1].index(1) if 1 in mask else len(mask))
        chosen = np.zeros((0, *shape), np.uint8) if sample.experts is None else sample.experts
        if (1 in mask and len(chosen) < needed) or chosen.shape[1:] != shape:
            raise ValueError(
                f"--use-rollout-routing-replay: trajectory {sample.trajectory_id} of group {sample.group_index} does "
                f"not say which experts the engine chose for {needed} tokens; samples of your own take the experts of "
                "the engine's generation, and saved samples have them if their run replayed them"
            )
        experts.append(chosen)
    return experts


# Show an iteration's training data to the user's function, which may change it: ``--rollout-data-postprocess-path``.


# Names of related launchers -> ours. Inputs of a step's denominators are excluded: they were computed before the split.
CHANGEABLE = {
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "rollout_log_probs": "rollout_log_probs",
}
FIXED = ("tokens", "response_lengths", "total_lengths", "loss_masks", "rewards", "sample_indices", "rollout_mask_sums")


def postprocessed(
    shards: Sequence[TrainShard], path: str, args: Any, iteration: int, has_advantages: bool
) -> list[TrainShard]:
    """Call the function at ``path`` on this rank's samples of an iteration; returns the shards with its changes.

    It is called as ``(args, rollout_id, rollout_data)``, ``(args, rollout_data)`` or ``(args)``, whichever it takes.
    ``rollout_data`` has one entry per sample in each column, of all steps one after the other; arrays are tensors on
    the CPU. Ranks that share samples call it with the same ones, and it must do the same on each.

    Args:
        shards: This rank's part of each step, scored.
        path: The function.
        args: The flags by their names.
        iteration: The number of the iteration.
        has_advantages: Whether the loss reads advantages.

    Raises:
        ValueError: A column that is not to be changed was changed, or one has other lengths, or numbers that are not
            finite.
    """
    function = DATA_POSTPROCESS.load(path)
    data = _columns([shard.batch for shard in shards], has_advantages)
    before = {name: list(data[name]) for name in FIXED}
    copies = {name: [value.clone() for value in before[name]] for name in ("tokens", "loss_masks")}
    known = set(data)
    count = DATA_POSTPROCESS.num_arguments(function, path)
    arguments: tuple[Any, ...] = {1: (args,), 2: (args, data), 3: (args, iteration, data)}[count]
    function(*arguments)
    _check(data, known, {**before, **copies}, path)
    ends = list(accumulate((len(shard.batch) for shard in shards), initial=0))
    return [
        replace(shard, batch=_changed(shard.batch, data, slice(*of_step), path))
        for shard, of_step in zip(shards, pairwise(ends), strict=True)
    ]


def _columns(steps: Sequence[TrainBatch], has_advantages: bool) -> dict[str, list[Any]]:
    """Return the columns of all steps by the names of related launchers."""
    import torch

    def tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.tensor(array) for array in arrays]  # copies: Ray's memory is read-only

    data: dict[str, list[Any]] = {name: [] for name in FIXED}
    for batch in steps:
        data["tokens"] += tensors(batch.tokens)
        data["response_lengths"] += batch.response_lengths
        data["total_lengths"] += batch.total_lengths
        data["loss_masks"] += tensors(batch.loss_masks)
        data["rewards"] += batch.rewards
        data["sample_indices"] += batch.trajectory_ids
        data["rollout_mask_sums"] += batch.trajectory_token_counts
        for name, field in CHANGEABLE.items():
            column = _with_advantages(batch) if field == "advantages" and has_advantages else getattr(batch, field)
            if column is not None:
                data.setdefault(name, []).extend(tensors(column))
    return data


def _with_advantages(batch: TrainBatch) -> list[np.ndarray]:
    """Return the advantage of each token; without a column of them it is its sample's reward."""
    if batch.advantages is not None:
        return batch.advantages
    pairs = zip(batch.response_lengths, batch.rewards, strict=True)
    return [np.full(length, reward, np.float32) for length, reward in pairs]


def _check(data: Mapping[str, Any], known: set[str], before: Mapping[str, Sequence[Any]], path: str) -> None:
    added = sorted(set(data) - known)
    if added:
        raise DATA_POSTPROCESS.fault(
            path, f"added {', '.join(added)}, which nothing reads; change the columns there are"
        )
    missing = sorted(known - set(data))
    if missing:
        raise DATA_POSTPROCESS.fault(path, f"removed {', '.join(missing)}; keep every column")
    changed = [name for name in FIXED if not _same(data[name], before[name])]
    if changed:
        raise DATA_POSTPROCESS.fault(
            path,
            f"changed {', '.join(changed)}, which the denominators of the step were computed from; set advantages to 0 "
            "for tokens that are not to be learned, or use --rollout-sample-filter-path for whole samples",
        )


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    pairs: Iterator[tuple[Any, Any]] = zip(now, before, strict=False)
    return len(now) == len(before) and all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _changed(batch: TrainBatch, data: Mapping[str, Any], of_step: slice, path: str) -> TrainBatch:
    columns: dict[str, Any] = {}
    for name, field in CHANGEABLE.items():
        if name in data:
            columns[field] = [np.asarray(value, np.float32) for value in data[name][of_step]]
            lengths = [array.shape for array in columns[field]]
            if lengths != [(length,) for length in batch.response_lengths]:
                raise DATA_POSTPROCESS.fault(path, f"gave {name} other lengths; keep one number per response token")
            if not all(np.isfinite(array).all() for array in columns[field]):
                raise DATA_POSTPROCESS.fault(path, f"gave {name} numbers that are not finite; return finite ones")
    return replace(batch, **columns)


# The user's own advantages, made of the samples of an iteration: ``--custom-reward-post-process-path``.


FLAG = "--custom-reward-post-process-path"


class RewardPostProcess:
    """Calls ``function(args, samples)``, which returns ``(rewards, advantages)``, each with a number per sample.

    The advantages replace the ones that the estimator makes of rewards (phase 1). Other launchers log the first list;
    here, metrics of rewards come from the reward function.
    """

    def __init__(self, path: str, settings: Settings) -> None:
        """Import the function. Raises ``ValueError`` if that is not possible."""
        self._path = path
        self._function = load_function(path, FLAG)
        self._args = flags_view(settings)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the advantages.

        Raises:
            ValueError: The function returns something else.
            Exception: Whatever it raises.
        """
        returned: Any = self._function(self._args, list(samples))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(f"{FLAG} {self._path}: returned {returned!r:.80}; return the rewards and the advantages")
        advantages = [float(advantage) for advantage in returned[1]]
        if len(advantages) != len(samples) or not all(math.isfinite(advantage) for advantage in advantages):
            raise ValueError(
                f"{FLAG} {self._path}: returned {len(advantages)} advantages for {len(samples)} samples, or one that "
                "is not finite; return one finite number per sample"
            )
        return advantages
