"""``--thinking-max-len N``: end the reasoning of an answer that is still thinking after N tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from miles.config.rollout import RolloutArguments
from miles.rollout.groups import response_seed
from miles.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class ThinkingLimit:
    """Generates a response in one piece, or interrupts its reasoning and lets the model answer.

    This is the forced interruption of ScaleRL (arXiv 2510.13786): if the first ``n`` tokens do not hold ``end``,
    ``interruption`` is appended, with loss mask 0, and the model continues from there. ``n`` is drawn for each response
    from ``min_len`` to ``max_len``, by its seed.
    """

    min_len: int  # tokens
    max_len: int
    end: str
    interruption: str

    @classmethod
    def from_flags(cls, rollout: RolloutArguments) -> ThinkingLimit:
        """Return the limit of the flags ``--thinking-…``."""
        longest, shortest = rollout.thinking_max_len, rollout.thinking_min_len
        assert longest is not None
        shortest = longest if shortest is None else shortest
        return cls(shortest, longest, rollout.thinking_end, rollout.thinking_interruption)

    async def __call__(self, trajectory: Trajectory) -> None:
        """Take the trajectory to its end. Raises the engine's errors."""
        draw = random.Random(response_seed(trajectory.seed_of_turn(0), "thinking"))
        thoughts = await trajectory.generate(max_new_tokens=draw.randint(self.min_len, self.max_len))
        if thoughts.finish_reason != "length" or trajectory.finished:
            return
        # The end may be a special token, which the text of a turn leaves out.
        if self.end not in trajectory.tokenizer.decode(thoughts.token_ids, skip_special_tokens=False):
            trajectory.append(self.interruption)
        if not trajectory.finished:
            await trajectory.generate()
