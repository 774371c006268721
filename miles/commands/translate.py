"""Translate the configuration of another trainer into flags, and show what its objective computes.

Read a file of TRL, verl, slime, miles, OpenRLHF, prime-rl or NeMo-RL. Nothing in the file is run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from miles.base.text import InputError
from miles.compat.translate.launchers.base import all_launchers, launcher_of
from miles.compat.translate.reading import read_document
from miles.compat.translate.report import report
from miles.compat.translate.translation import Translation
from miles.config.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Print the translation of a file and return 0; 2 if the file cannot be read."""
    parser = CommandParser(prog="miles translate", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="a .json, .yaml, .toml, .py or .sh file of another trainer")
    parser.add_argument(
        "--from", dest="source", choices=tuple(all_launchers()), help="the trainer; default: the one that fits the file"
    )
    arguments = parser.parse_args(list(argv))
    try:
        document = read_document(arguments.file)
        launcher = launcher_of(document, arguments.source)
        translation = Translation(document, launcher.table())
        objective = launcher.translate(translation)
        settings = list(document.settings.values())
        known = translation.document.settings.keys() & translation.table.rows.keys()
        if settings and translation.table.rows and not known:
            raise InputError(
                f"{arguments.file}: none of its {len(settings)} settings, such as {settings[0].shown}, is one of "
                f"{translation.table.version}: another release may name them otherwise; give --from if it is "
                "the file of another trainer"
            )
        print(report(launcher.name, translation, objective))
    except InputError as error:
        print(f"miles translate: {error}", file=sys.stderr)
        return 2
    return 0
