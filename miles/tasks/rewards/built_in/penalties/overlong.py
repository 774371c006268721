"""``--rm-type overlong``: the soft overlong penalty of DAPO (arXiv 2503.14476)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from miles.base.flags import Errors, flag
from miles.tasks.rewards.base import Reward, Rewards
from miles.types.sample import Sample


@dataclass(frozen=True)
class OverlongFlags:
    """overlong: the flags of ``--rm-type overlong``."""

    overlong_max_len: Optional[int] = flag(
        None,
        "L_max: response tokens at which the penalty of --rm-type overlong is whole, such as "
        "--rollout-max-response-len",
        at_least=1,
    )
    overlong_buffer_len: int = flag(
        4096, "L_cache: tokens before --overlong-max-len over which the penalty of --rm-type overlong grows", at_least=1
    )


class Overlong(Reward[OverlongFlags]):
    """The length reward of DAPO, equation 13: 0 up to L_max - L_cache tokens, then down to -1 at L_max, and -1 beyond.

    In between it is ``R(y) = ((L_max - L_cache) - |y|) / L_cache``. The paper has L_max 20480 and L_cache 4096, and
    adds it to a reward of 1 or -1: ``--rm-type dapo:1,overlong:1``.
    """

    name = "overlong"
    summary = "0, falling to -1 over the last tokens before the length limit (DAPO's penalty)"
    needs_label = False
    own_flags = OverlongFlags

    def check(self, flags: OverlongFlags, errors: Errors) -> None:
        """Check that the limit is given and the buffer is within it."""
        errors.require("overlong_max_len", flags.overlong_max_len, "--rm-type overlong needs the length limit")
        limit = flags.overlong_max_len
        if limit is not None and errors.none_about("overlong_buffer_len") and flags.overlong_buffer_len > limit:
            rule = f"is more than --overlong-max-len {limit}"
            errors.refuse("overlong_buffer_len", flags.overlong_buffer_len, rule, "give less")

    def score(self, samples: Sequence[Sample], flags: OverlongFlags) -> Rewards:
        """Compare lengths with the limit."""
        longest = flags.overlong_max_len
        assert longest is not None, "check() requires it"
        return [overlong_penalty(len(sample.response_ids), longest, flags.overlong_buffer_len) for sample in samples]


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Return the penalty of a response of so many tokens.

    >>> [overlong_penalty(tokens, 100, 20) for tokens in (80, 90, 100, 500)]
    [0.0, -0.5, -1.0, -1.0]
    """
    return max(-1.0, min(0.0, (limit - buffer - tokens) / buffer))
