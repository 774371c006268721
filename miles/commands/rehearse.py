"""Print what a training command's run will need: memory, arithmetic, traffic and time, without GPUs and weights."""

from collections.abc import Sequence

from miles.commands import train


def main(argv: Sequence[str]) -> int:
    """Rehearse the flags ``argv`` and return 0.

    Raises:
        SystemExit: With status 2 for wrong flags.
    """
    return train.main([*argv, "--rehearse"])
