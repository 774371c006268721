"""``--thinking-max-len N``: end the reasoning of an answer that is still thinking after N tokens."""

from __future__ import annotations

from dataclasses import dataclass

from miles.arguments.rollout import RolloutArguments
from miles.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class ThinkingLimit:
    """Generates a response in one piece, or interrupts its reasoning and lets the model answer.

    This is the forced interruption of ScaleRL (arXiv 2510.13786): if the first ``max_len`` tokens do not hold ``end``,
    ``interruption`` is appended, with loss mask 0, and the model continues from there.
    """

    max_len: int  # tokens
    end: str
    interruption: str

    @classmethod
    def from_flags(cls, rollout: RolloutArguments) -> ThinkingLimit:
        """Return the limit of the flags ``--thinking-max-len``, ``--thinking-end`` and ``--thinking-interruption``."""
        assert rollout.thinking_max_len is not None
        return cls(rollout.thinking_max_len, rollout.thinking_end, rollout.thinking_interruption)

    async def __call__(self, trajectory: Trajectory) -> None:
        """Take the trajectory to its end. Raises what the engine raises."""
        thoughts = await trajectory.generate(max_new_tokens=self.max_len)
        if thoughts.finish_reason != "length" or trajectory.finished:
            return
        # The end may be a special token, which the text of a turn leaves out.
        if self.end not in trajectory.tokenizer.decode(thoughts.token_ids, skip_special_tokens=False):
            trajectory.append(self.interruption)
        if not trajectory.finished:
            await trajectory.generate()
