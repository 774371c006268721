"""Run variants times seeds as independent training runs, and compare them.

FILE describes the runs (docs/report.md). Each run is a miles train in a process and a separate folder. The same command
continues after an interruption: finished runs are kept, others resume from their last checkpoint or start again. Exit
status 0: all runs are finished; 1: some failed twice, or a file could not be written; 2: wrong flags, and nothing was
started; 128 + N: stopped by signal N.
"""

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from miles.base.flags import LONGEST_MESSAGE, FlagError, count
from miles.base.locks import locked_folders
from miles.base.secrets import public_words
from miles.base.text import one_line
from miles.commands.sweeps.definition import TABLE_CSV, TABLE_JSON, Definition, plan, read_definition
from miles.commands.sweeps.results import Results, text_table, write_page, write_tables
from miles.commands.sweeps.run_queue import (
    Ended,
    Forks,
    Machine,
    RunQueue,
    Slot,
    Starter,
    SweepProgress,
    slots,
    start_process,
    summary,
)
from miles.commands.sweeps.swept_run import TRAIN, RunStart, SweptRun
from miles.commands.train import in_one_process
from miles.config.command_parser import CommandParser
from miles.config.rules import check_one_process

# The modules that a run in one process uses.
USED_BY_RUNS = (
    "miles.commands.train",
    "miles.run.launcher",
    "miles.engine.embedded.torch_engine",
    "miles.training.fsdp.backend",
    "miles.training.trainer",
)


def main(argv: Sequence[str]) -> int:
    """Run the sweep and write its comparison; return the exit status."""
    parser = CommandParser(prog="miles sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path, metavar="FILE", help="the sweep, as YAML or TOML")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: as many as have own devices)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of all runs (default: outputs/NAME_OF_FILE)")
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="run each as one process without Ray, a fork of one that has imported all: for short runs on CPU",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--page-only", action="store_true", help="run nothing, and write the comparison of what is there"
    )
    which.add_argument("--explain", action="store_true", help="print the runs and their commands, then stop")
    options = parser.parse_args(list(argv))
    parser.refuse_below_one(jobs=options.jobs)
    try:
        definition = read_definition(options.file)
        out: Path = options.out or definition.output
        planned = plan(definition, out, check_one_process if options.one_process else None)
        devices = slots(options.jobs, [run.settings for run in planned], Machine.here())
    except FlagError as error:
        return _refuse(error.messages)
    runs = [SweptRun(run) for run in planned]
    again = ["miles", "sweep", *argv]
    if options.explain:
        print(_explained(runs, devices))
        return 0
    if options.page_only:
        try:
            _compare(definition, runs, out)
        except ValueError as error:  # a file of a run is damaged
            return _refuse([str(error)])
        except OSError as error:
            return _stopped_by(error, out, again)
        return 0
    with ExitStack() as lock:
        try:
            lock.enter_context(locked_folders([("--out", out)]))
        except ValueError as error:  # another sweep writes there, or nobody can
            return _refuse([str(error)])
        faults = [fault for run in runs if (fault := _fault(run)) is not None]
        if faults:
            return _refuse(faults)
        start = Forks(TRAIN, in_one_process, USED_BY_RUNS) if options.one_process else start_process
        return _run(definition, runs, devices, out, again, start)


def _fault(run: SweptRun) -> str | None:
    """Say why the run cannot be done in its folder, also if its metrics are damaged; None if it can."""
    try:
        return run.fault()
    except ValueError as error:
        return str(error)


def _refuse(messages: Sequence[str]) -> int:
    texts = [one_line(message, LONGEST_MESSAGE) for message in messages]
    if len(texts) == 1:
        print(f"miles sweep: error: {texts[0]}", file=sys.stderr)
    else:
        lines = [f"miles sweep: {len(texts)} errors, and nothing was started:", *(f"  {text}" for text in texts)]
        print("\n".join(lines), file=sys.stderr)
    return 2


def _run(
    definition: Definition, runs: Sequence[SweptRun], devices: list[Slot], out: Path, command: list[str], start: Starter
) -> int:
    to_do = [run for run in runs if not run.is_finished]
    devices = devices[: len(to_do)]
    print(_beginning(definition, runs, to_do, devices), flush=True)
    ended = Ended()
    try:
        if to_do:
            progress = SweepProgress(to_do, len(runs) - len(to_do))
            try:
                ended = RunQueue(to_do, devices, progress, start).run()
            finally:
                progress.close()
        _compare(definition, runs, out)
    except OSError as error:  # the queue has stopped its runs
        return _stopped_by(error, out, command)
    unfinished = sum(not run.is_finished for run in runs)
    last = summary(ended, unfinished, shlex.join(command))
    if last:
        print(f"\n{last}", file=sys.stderr)
    if ended.signal is not None:
        return 128 + ended.signal
    return 1 if unfinished else 0


def _stopped_by(error: OSError, out: Path, command: Sequence[str]) -> int:
    """Say why a file of the sweep cannot be used, as on a full disk, and how to continue; return the status.

    Raises:
        BrokenPipeError: It was the output of this command, which nobody reads any more.
    """
    if isinstance(error, BrokenPipeError):
        raise error
    where = "" if error.filename is None else f" at {error.filename}"
    why = f"--out {out}: cannot continue ({error.strerror or error}{where})"
    print(f"miles sweep: error: {why}; correct that, and {shlex.join(command)} continues", file=sys.stderr)
    return 1


def _beginning(
    definition: Definition, runs: Sequence[SweptRun], to_do: Sequence[SweptRun], devices: Sequence[Slot]
) -> str:
    what = f"{count(len(definition.variants), 'variant')} × {count(len(definition.seeds), 'seed')}"
    lines = [f"sweep: {count(len(runs), 'run')} ({what}), {len(runs) - len(to_do)} finished before"]
    if to_do:
        lines[0] += f"; {len(devices)} at once, each on {devices[0]}"
    lines += [f"  {run.name} {run.in_words()}" for run in to_do if run.start is not RunStart.NEW]
    return "\n".join(lines)


def _explained(runs: Sequence[SweptRun], devices: Sequence[Slot]) -> str:
    lines = [f"{count(len(runs), 'run')}, {len(devices)} at once, each on {devices[0]}"]
    for run in runs:
        fault = _fault(run)
        lines += [f"\n{run.name} {run.in_words() if fault is None else f'cannot run: {fault}'}"]
        lines += [f"  miles train {shlex.join(public_words(run.planned.words))}"]
    return "\n".join(lines)


def _compare(definition: Definition, runs: Sequence[SweptRun], out: Path) -> None:
    results = Results(definition, runs)
    print(f"\n{text_table(results)}")
    if results.missing_metrics and results.finished:
        print(f"note: metrics: no finished run has {', '.join(results.missing_metrics)}")
    out.mkdir(parents=True, exist_ok=True)
    write_tables(results, out)
    page = write_page(results, out)
    print(f"\npage: {page}; tables: {out / TABLE_JSON} and {out / TABLE_CSV}", flush=True)
