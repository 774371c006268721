"""Write the four trajectories of docs/loss-aggregation.md: ``python make_samples.py FILE``.

There are two prompts with two trajectories each, of 2 and 6 tokens and of 4 and 8 tokens. Only the first has a reward.
The token ids do not matter: in the first step the ratio of new to old policy is 1, and a token's loss is minus its
advantage.
"""

from __future__ import annotations

import sys

from miles.rollout.debug_data import save_rollout
from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus

LENGTHS = ((2, 6), (4, 8))


def main() -> None:
    """Write the file given on the command line."""
    groups, trajectory = [], 0
    for number, lengths in enumerate(LENGTHS):
        group = PromptGroup(number, Prompt(f"prompt {number}", tuple(range(10, 15))))
        for length in lengths:
            sample = Sample(
                group.prompt,
                number,
                trajectory,
                response_ids=list(range(20, 20 + length)),
                loss_mask=[1] * length,
                rollout_log_probs=[-1.0] * length,
                reward=1.0 if trajectory == 0 else 0.0,
                status=SampleStatus.COMPLETED,
            )
            group.samples.append(sample)
            trajectory += 1
        groups.append(group)
    save_rollout(sys.argv[1], 0, groups)


if __name__ == "__main__":
    main()
