"""The subcommands of ``miles``: one module each, found by its file name.

A module ``miles/commands/NAME.py`` is the command ``miles NAME``. Its docstring's first line is shown by
``miles --help``, and its function ``main(argv: Sequence[str]) -> int`` runs it and returns the exit status.
"""
