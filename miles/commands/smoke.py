"""Run a training command for a few iterations on a tiny random model of the same family, and check its metrics.

Write the flags of the training command after ``--``. Everything is written into a folder of its own. Exit status 0: all
checks passed; 1: a check failed; 2: wrong flags; 3: the run failed; 4: it took longer than --timeout.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from miles.base.hidden_secrets import hide_on_command_line
from miles.base.input_error import InputError
from miles.base.junit import CheckResult, write_junit
from miles.commands.smoke_parts.expectations import Expectation, read_expectations
from miles.commands.smoke_parts.shrink import MODEL, REWARD, RUN, shrink
from miles.config.command_parser import CommandParser
from miles.config.parser import main_parse
from miles.config.settings import Settings
from miles.config.validate import Validated, validate
from miles.observe.tracking.run_files import RunFiles

PASSED, CHECK_FAILED, RUN_FAILED, TOO_SLOW = 0, 1, 3, 4
END_SECONDS = 30.0  # for a run that is stopped
SHOWN_LINES = 40  # of a run that failed
LOG = "log.txt"


def main(argv: Sequence[str]) -> int:
    """Run the command, print the checks and return their status.

    Raises:
        SystemExit: With status 2 for wrong flags, of this command or after ``--``.
    """
    hide_on_command_line(argv)
    parser = CommandParser(
        prog="miles smoke", usage="%(prog)s [options] -- FLAGS", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--expect", action="append", default=[], metavar="TEXT", help="a check, 'METRIC >= NUMBER'; may be repeated"
    )
    parser.add_argument("--expect-file", type=Path, metavar="FILE", help="a file with one check per line")
    parser.add_argument("--iterations", type=int, default=2, help="iterations to run (default: 2)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the run may take (default: 300)")
    parser.add_argument(
        "--model", metavar="FOLDER", help="configuration and tokenizer, if --hf-checkpoint is not on this machine"
    )
    parser.add_argument("--folder", type=Path, help="a new folder for all files (default: a temporary one, removed)")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the checks as JUnit XML")
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    if end == len(words):
        parser.error("the flags of a training command are missing; write them after --")
    for flag, value in (("--iterations", given.iterations), ("--timeout", given.timeout)):
        if not 1 <= value < float("inf"):
            parser.error(f"{flag} {value:g}: must be finite and at least 1; give 1 or more")
    if given.folder is not None and given.folder.exists():
        parser.error(f"--folder {given.folder}: is there already; give a new one")
    try:
        expectations = [Expectation.parse(text) for text in given.expect]
        expectations += read_expectations(given.expect_file) if given.expect_file is not None else []
    except InputError as error:
        parser.error(str(error))
    model = [] if given.model is None else ["--hf-checkpoint", given.model]
    settings = main_parse([*words[end + 1 :], *model]).settings
    with _folder(given.folder) as folder:
        try:
            small, notes = shrink(settings, folder, given.iterations)
        except (InputError, ValueError, OSError) as error:
            parser.error(str(error))
        for note in notes:
            print(f"note: {note}", flush=True)
        status, results = _run(small, str(settings.model.hf_checkpoint), folder, given.timeout)
        if status == PASSED:
            results += _check(folder, expectations)
            status = CHECK_FAILED if any(result.fault is not None for result in results) else PASSED
    for result in results:
        print(f"passed  {result.name}" if result.fault is None else f"FAILED  {result.name}: {result.fault}")
    print(f"{'passed' if status == PASSED else 'failed'} in {results[0].seconds:.0f} s")
    if given.junit is not None:
        try:
            write_junit(given.junit, "smoke", results)
        except OSError as error:
            parser.error(f"--junit {given.junit}: cannot be written ({error.strerror}); give another file")
    return status


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True)
        yield given.absolute()
        return
    # Processes of a run that was killed may still write while it is removed.
    with tempfile.TemporaryDirectory(prefix="miles-smoke-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _run(settings: Settings, model: str, folder: Path, seconds: float) -> tuple[int, list[CheckResult]]:
    """Run the small run in a process of its own; return the status, and whether the run ended well as a check."""
    path = os.pathsep.join([str(folder / REWARD), *(entry or os.getcwd() for entry in sys.path)])
    began = time.perf_counter()
    status, fault = PASSED, None
    with (folder / LOG).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            child.communicate(pickle.dumps((settings, model, folder)), timeout=seconds)
        except subprocess.TimeoutExpired:
            status, fault = TOO_SLOW, f"it was stopped after {seconds:g} s (--timeout)"
        finally:
            _end(child)
    if status == PASSED and child.returncode != 0:
        status, fault = RUN_FAILED, f"it ended with status {child.returncode}"
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    if fault is not None:
        print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
    elapsed = time.perf_counter() - began
    return status, [CheckResult("the run ends", elapsed, fault, "\n".join(lines[-SHOWN_LINES:]))]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the run if it has not ended: with SIGTERM, by which it ends its processes, and after a while with SIGKILL."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _check(folder: Path, expectations: Sequence[Expectation]) -> list[CheckResult]:
    """Return what the metrics of the run say about each expectation."""
    metrics: dict[str, list[float]] = {}
    for row in RunFiles(folder / RUN).read_metrics():
        for name, value in row.items():
            metrics.setdefault(name, []).append(value)
    results = [CheckResult("a gradient arrives", 0.0, _gradient_fault(metrics))]
    return results + [CheckResult(each.text, 0.0, each.fault(metrics)) for each in expectations]


def _gradient_fault(metrics: Mapping[str, Sequence[float]]) -> str | None:
    """Say that no step had a finite gradient other than 0; None if one had, or if the run logs no gradient."""
    if "train/grad_norm" not in metrics:
        return None
    return Expectation.parse("max(train/grad_norm) > 0").fault(metrics)


def _train() -> None:
    """Train the small run that standard input describes: the process that ``_run`` starts."""
    settings, source, folder = pickle.load(sys.stdin.buffer)
    from miles.commands import train
    from miles.models.tiny.write import write_like

    write_like(source, folder / MODEL)
    validated: Validated = validate(settings)
    train.start(validated)


if __name__ == "__main__":
    _train()
