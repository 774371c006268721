"""Build the training data with the user's function: ``--custom-convert-samples-to-train-data-path``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.types.sample import Prompt, PromptGroup, Sample

FLAG = "--custom-convert-samples-to-train-data-path"
REQUIRED = ("tokens", "response_lengths", "rewards")
OPTIONAL = ("loss_masks", "rollout_log_probs", "sample_indices")
NOT_READ = ("raw_reward", "truncated", "round_number", "metadata")  # what other launchers log, or pass on


def converted_groups(returned: Any, groups: Sequence[PromptGroup], path: str) -> list[PromptGroup]:
    """Return the groups with the rows of ``returned`` as their samples.

    Args:
        returned: The columns that the function has returned, with one entry per row. ``tokens`` are those of prompt and
            response, ``rewards`` the advantages, ``loss_masks`` and ``rollout_log_probs`` have one entry per response
            token; without them, a row has those of the sample whose tokens it repeats. ``sample_indices`` name the
            trajectory of each row, as ``sample.index`` does; without them there is a row for each sample, in order.
        groups: The groups that the function was given.
        path: The function, for messages.

    Raises:
        ValueError: A column is missing, unknown, or of another length, or a row is malformed.
    """
    samples = [sample for group in groups for sample in group.samples]
    columns = _columns(returned, path)
    rows = len(columns["tokens"])
    owners = _owners(columns, samples, rows, path)
    by_group: dict[int, list[Sample]] = {group.group_index: [] for group in groups}
    for row, owner in enumerate(owners):
        by_group[owner.group_index].append(_sample(columns, row, owner, path))
    made = []
    for group in groups:
        kept = by_group[group.group_index]
        missing = {s.trajectory_id for s in group.samples} - {s.trajectory_id for s in kept}
        dropped = group.dropped_trajectories + len(missing)
        made.append(replace(group, samples=kept, dropped_trajectories=dropped, unconverted_trajectories=len(missing)))
    return made


def _columns(returned: Any, path: str) -> Mapping[str, Sequence[Any]]:
    if not isinstance(returned, Mapping):
        raise ValueError(f"{FLAG} {path}: returned {returned!r:.80}; return columns by name: {', '.join(REQUIRED)}, …")
    missing = [name for name in REQUIRED if name not in returned]
    unknown = [str(name) for name in returned if name not in (*REQUIRED, *OPTIONAL, *NOT_READ)]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is not read here"
        raise ValueError(f"{FLAG} {path}: its result {what}; the columns are {', '.join((*REQUIRED, *OPTIONAL))}")
    lengths = {name: len(returned[name]) for name in (*REQUIRED, *OPTIONAL) if returned.get(name) is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{FLAG} {path}: its columns have the lengths {lengths}; return one entry per row in each")
    return returned


def _owners(columns: Mapping[str, Sequence[Any]], samples: Sequence[Sample], rows: int, path: str) -> list[Sample]:
    """Return the sample that each row repeats, or else the first of the trajectory that it belongs to."""
    indices = columns.get("sample_indices")
    if indices is None:
        if rows != len(samples):
            raise ValueError(
                f"{FLAG} {path}: returned {rows} rows for {len(samples)} samples; name the trajectory of each row in "
                "sample_indices"
            )
        return list(samples)
    by_trajectory: dict[Any, list[Sample]] = {}
    for sample in samples:
        by_trajectory.setdefault(sample.trajectory_id, []).append(sample)
    owners = []
    for row, index in enumerate(indices):
        if index not in by_trajectory:
            raise ValueError(f"{FLAG} {path}: sample_indices has {index!r:.80}, which is the index of no sample")
        of_trajectory = by_trajectory[index]
        tokens, length = list(columns["tokens"][row]), int(columns["response_lengths"][row])
        repeated = (s for s in of_trajectory if s.response_length == length and s.tokens == tokens)
        owners.append(next(repeated, of_trajectory[0]))
    return owners


def _sample(columns: Mapping[str, Sequence[Any]], row: int, owner: Sample, path: str) -> Sample:
    tokens, length = [int(token) for token in columns["tokens"][row]], int(columns["response_lengths"][row])
    if not 0 < length < len(tokens):
        raise ValueError(
            f"{FLAG} {path}: row {row} has {len(tokens)} tokens and a response of {length}; give both a prompt and a "
            "response"
        )
    advantage = float(columns["rewards"][row])
    if not math.isfinite(advantage):
        raise ValueError(f"{FLAG} {path}: row {row} has the advantage {advantage}; return finite numbers")
    response, prompt = tokens[-length:], tuple(tokens[:-length])
    masks, log_probs = columns.get("loss_masks"), columns.get("rollout_log_probs")
    is_unchanged = response == owner.response_ids and prompt == owner.prompt.token_ids
    missing = [name for name in ("loss_masks", "rollout_log_probs") if columns.get(name) is None]
    if missing and not is_unchanged:
        raise ValueError(
            f"{FLAG} {path}: row {row} has other tokens than the samples of trajectory {owner.index}; give its "
            f"{' and '.join(missing)}"
        )
    sample = Sample(
        owner.prompt if prompt == owner.prompt.token_ids else Prompt(owner.prompt.text, prompt, owner.label),
        owner.group_index,
        owner.trajectory_id,
        response_ids=response,
        response=owner.response,
        loss_mask=list(owner.loss_mask) if masks is None else [int(mask) for mask in masks[row]],
        rollout_log_probs=list(owner.rollout_log_probs) if log_probs is None else [float(p) for p in log_probs[row]],
        status=owner.status,
        reward=owner.reward,
        reward_parts=owner.reward_parts,
        weight_versions=list(owner.weight_versions) if is_unchanged else [],
        support=owner.support if is_unchanged else None,
        experts=owner.experts if is_unchanged else None,
        remove_sample=owner.remove_sample,
        advantage=advantage,
    )
    try:
        sample.check()
    except ValueError as error:
        raise ValueError(f"{FLAG} {path}: row {row}: {error}") from None
    return sample
