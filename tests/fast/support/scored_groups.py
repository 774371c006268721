"""Make scored prompt groups from token counts and rewards."""

from __future__ import annotations

from collections.abc import Sequence

from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus


def scored_group(
    group_index: int, trajectories: Sequence[Sequence[tuple[int, float]]], first_trajectory_id: int
) -> PromptGroup:
    """Return a group of trajectories, each a list of samples (loss tokens, reward). Samples end with a masked token."""
    prompt = Prompt(
        f"prompt {group_index}", (1,) * (1 + group_index), label=group_index, source=f"set.jsonl:{group_index + 1}"
    )
    samples = [
        Sample(
            prompt,
            group_index,
            trajectory_id=first_trajectory_id + k,
            response_ids=[5] * (tokens + 1),
            loss_mask=[1] * tokens + [0],
            rollout_log_probs=[-0.25] * (tokens + 1),
            status=SampleStatus.COMPLETED,
            reward=reward,
        )
        for k, parts in enumerate(trajectories)
        for tokens, reward in parts
    ]
    return PromptGroup(group_index, prompt, samples)
