"""Compare runs: settings that differ, the first step at which metrics differ, and curves over each other."""

from collections.abc import Sequence
from pathlib import Path

from miles.commands.saved_runs.run import add_run
from miles.config.command_parser import CommandParser
from miles.observe.page import save_page
from miles.observe.report.comparison import Comparison
from miles.observe.run_files import why_not_written


def main(argv: Sequence[str]) -> int:
    """Print the comparison, write it as a page if asked to, and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments.
    """
    parser = CommandParser(prog="miles compare", description=__doc__)
    add_run(parser, "runs", nargs="+")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write a page with all curves over each other")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="relative difference up to which two values are equal (default: 0, any difference counts)",
    )
    options = parser.parse_args(argv)
    if not 0 <= options.tolerance < float("inf"):
        parser.error(f"--tolerance {options.tolerance:g}: must be finite and at least 0; give 0 or more")
    if options.page is not None and (fault := why_not_written(options.page)) is not None:
        parser.error(f"--page {options.page}: {fault}")
    try:
        comparison = Comparison(options.runs, options.tolerance)
        print(comparison.text())
        if options.page is not None:
            save_page(comparison.page(), options.page)
            print(f"\npage: {options.page}")
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0
