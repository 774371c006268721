"""Show a run in the browser while it runs or afterwards: curves, health, time, samples."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from miles.commands.saved_runs.run import add_run
from miles.config.command_parser import CommandParser
from miles.observe.page import write_report
from miles.observe.report.server import HOST, ReportServer
from miles.observe.run_files import RunHeader, why_not_written

PORT = 8600


def main(argv: Sequence[str]) -> int:
    """Serve the page of a run until interrupted, or write it as one file; return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments.
    """
    parser = CommandParser(prog="miles report", description=__doc__)
    add_run(parser)
    parser.add_argument(
        "--port", type=int, help=f"port of the loopback address; 0 takes a free one (default: {PORT}, else a free one)"
    )
    parser.add_argument("--static", type=Path, metavar="FILE", help="write the page into one file and end")
    parser.add_argument(
        "--samples", type=int, default=4, help="with --static: answers per iteration in the file (default: 4)"
    )
    options = parser.parse_args(argv)
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: must be at least 0; give 0 for none")
    if options.static is not None and (fault := why_not_written(options.static)) is not None:
        parser.error(f"--static {options.static}: {fault}")
    try:
        RunHeader.load(options.run)
        if options.static is not None:
            print(write_report(options.run, options.samples, options.static))
            return 0
        server = _serve(options.run, options.port)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's ``&`` would ignore it
    print(f"{server.url} shows {options.run}; end with Ctrl-C", flush=True)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.close()
    return 0


def _serve(run: Path, port: int | None) -> ReportServer:
    try:
        return ReportServer(run, PORT if port is None else port)
    except OSError as error:
        if port is None:
            print(f"port {PORT} is in use, perhaps by the page of another run; taking a free one", file=sys.stderr)
            return ReportServer(run, 0)
        raise ValueError(f"--port {port}: cannot serve on {HOST}:{port} ({error.strerror}); give another") from error
    except OverflowError as error:
        raise ValueError(f"--port {port}: is not a port; give one from 1024 to 65535, or 0 for any") from error
