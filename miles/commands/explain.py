"""Print what a training command would compute, write and start, without starting it."""

from collections.abc import Sequence

from miles.commands import train


def main(argv: Sequence[str]) -> int:
    """Print the explanation of the flags ``argv`` and return 0.

    Raises:
        SystemExit: With status 2 for wrong flags.
    """
    return train.main([*argv, "--explain"])
