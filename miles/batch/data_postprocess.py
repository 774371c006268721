"""Show what an iteration trains on to the user's function, which may change it: ``--rollout-data-postprocess-path``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.objective.hooks import DATA_POSTPROCESS
from miles.types.train_batch import TrainBatch, TrainShard

if TYPE_CHECKING:
    import torch

# Their names -> ours. Inputs of a step's denominators are excluded, because these were computed before the split.
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
    function(*{1: (args,), 2: (args, data), 3: (args, iteration, data)}[count])
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
        for name, ours in CHANGEABLE.items():
            column = _with_advantages(batch) if ours == "advantages" and has_advantages else getattr(batch, ours)
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
    for name, ours in CHANGEABLE.items():
        if name in data:
            columns[ours] = [np.asarray(value, np.float32) for value in data[name][of_step]]
            lengths = [array.shape for array in columns[ours]]
            if lengths != [(length,) for length in batch.response_lengths]:
                raise DATA_POSTPROCESS.fault(path, f"gave {name} other lengths; keep one number per response token")
            if not all(np.isfinite(array).all() for array in columns[ours]):
                raise DATA_POSTPROCESS.fault(path, f"gave {name} numbers that are not finite; return finite ones")
    return replace(batch, **columns)
