"""The subcommands of ``miles``: one module each, found by its file name.

A module ``miles/commands/NAME.py`` is the command ``miles NAME``. Its docstring's first line is shown by
``miles --help``, and its function ``main(argv: Sequence[str]) -> int`` runs it and returns the exit status.
"""

import pkgutil


def command_names() -> list[str]:
    """Return the names of all subcommands, sorted. ``check_reward.py`` is ``check-reward``."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if not module.ispkg)
