"""Check what this machine can run: packages, devices, cores, memory, disk, ports, leftovers of killed runs.

The exit status is 0 if training can run, else 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from miles.commands.doctor_parts.finding import as_json, as_text, can_train
from miles.commands.doctor_parts.host import check_host, check_leftovers
from miles.commands.doctor_parts.packages import check_packages
from miles.config.command_parser import CommandParser


def main(argv: Sequence[str]) -> int:
    """Print what was found; return 0 if training can run, else 1.

    Raises:
        SystemExit: With status 2 for wrong arguments.
    """
    parser = CommandParser(prog="miles doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--clean", action="store_true", help="remove what killed runs of this user left")
    parser.add_argument("--quick", action="store_true", help="look at the installed packages without importing them")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="longest time of an import (default: 120)"
    )
    given = parser.parse_args(argv)
    if not 0 < given.timeout < math.inf:
        parser.error(f"--timeout {given.timeout:g}: must be finite and above 0; give the seconds of an import")
    findings = [
        *check_packages(given.quick, given.timeout),
        *check_host(Path.cwd()),
        check_leftovers(given.clean, given.timeout),
    ]
    print(as_json(findings) if given.json else as_text(findings))
    return 0 if can_train(findings) else 1
