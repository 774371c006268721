"""Kill processes of runs at random moments, and check how each run ends and resumes.

    python tests/kill_campaign/campaign.py --results tests/kill_campaign/results.jsonl --trials 50
    python tests/kill_campaign/campaign.py --results tests/kill_campaign/results.jsonl --table    what was tried so far

A trial waits until a phase of the loop of a run begins, sends a signal to one process, and then checks that the run
ends or continues within a bound. A run continues if the process that got the signal is gone, the run has restarted if
it needs to, and two checkpoints have been saved since. Then the same run gets the next signal. If the run ends, the
last line must blame what was killed, no process and no file may be left, and the next signal goes to the run that
resumes it. If launcher and guard are killed together, nothing may be left once the next run has started.

Processes of a run are those below its holder (``held_command.py``). Its files are those that it had open.

A series is up to ``SERIES`` trials. Its last run is left alone, and must have the rows of metrics.jsonl of an
uninterrupted one (or, where responses do not repeat, its prompts) and have trained on every prompt once. A fault of
that is a problem of the last trial.

A trial appends one line to the results, at the end of its series. A campaign that was stopped continues with what was
tried least often. Ctrl-C or SIGTERM lets the runs end first, the second one does not. The files of a series with a
problem are kept below ``--keep``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fast" / "support")]

import psutil  # noqa: E402

from miles.base.processes import RUN_FOLDER  # noqa: E402
from miles.engine.servers.leftovers import open_segments  # noqa: E402
from tests.fast.conftest import VLLM_SHAPE, save_tiny_model  # noqa: E402
from tests.fast.run.runs.launches import Launch, importing_from, kind_of, prepare_workplace, small_run, trained  # noqa: E402
from tests.kill_campaign.trials import LOAD, REPLACED_BY_RESTART, SETUPS, SIGNALS, TARGETS, Plan, Trial  # noqa: E402

ITERATIONS, STEPS = 24, 2
SERIES = 10
NOTE_SECONDS = 1.0  # between two looks at the files of a run
SAVES = 2  # a run that has saved so often after a signal, without the process that got it, continues
MOMENT_SECONDS = 600  # from the end of the previous trial, or the start of a run (minutes with vLLM), to the moment
END_SECONDS = 240  # from the signal to the end of the run, or until it continues; the machine may be busy
LEFT_SECONDS = 5  # from the end of the launcher to the end of everything else
PAUSE_SECONDS = 3  # a stopped launcher continues after this
GUARD = "miles.run.run_guard"
SHARED = "/dev/shm/"


class CampaignStopped(Exception):
    """The campaign got SIGINT or SIGTERM."""


@dataclass
class Outcome:
    """What happened in ``seconds`` after a signal. ``status`` is None if the run continued."""

    seconds: float = 0.0
    status: int | None = None
    last: str = ""
    problems: list[str] = field(default_factory=list)


class AnnouncedRun(Launch):
    """A run that writes its output, and the phases of its loop, into files of the folder ``logs``."""

    def __init__(self, output: Path, logs: Path, flags: list[str], environment: dict[str, str]) -> None:
        self.logs = logs
        self.files: set[Path] = set()  # temporary folders (a run that restarts gets another) and shared memory
        self.noted = 0.0  # time.monotonic() of the last look at them
        logs.mkdir(parents=True)
        super().__init__(output, flags, ANNOUNCED=str(logs / "announced"), **environment)

    def start(self, command, environment):  # type: ignore[no-untyped-def]  # as in Launch
        with (self.logs / "stdout").open("w") as out, (self.logs / "stderr").open("w") as err:
            super().start(command, environment, out, err)

    def has_ended(self) -> bool:
        if time.monotonic() > self.noted + NOTE_SECONDS:
            self.note_files()
            self.noted = time.monotonic()
        return self.process.poll() is not None

    def count(self, phase: str) -> int:
        """Return how often a phase has started."""
        announced = self.logs / "announced"
        return announced.read_text().splitlines().count(phase) if announced.exists() else 0

    def last_line(self) -> str:
        lines = (self.logs / "stderr").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def note_files(self) -> None:
        """Note the run's temporary folder and shared memory, as its processes have them now."""
        self.files.update(map(Path, open_segments(self.left())))
        for process in self.left():
            try:
                folder = process.environ().get(RUN_FOLDER)
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            if folder:
                self.files.add(Path(folder))
            self.files.update(Path(line[line.index(SHARED) :]) for line in lines if SHARED in line)

    def end_problems(self) -> list[str]:
        """Return the processes and files that an ended run has left behind, in words."""
        problems = []
        if not self.none_left(LEFT_SECONDS):
            lines = [" ".join(words)[:60] for _, words in self.command_lines()]
            problems.append(f"left after {LEFT_SECONDS} s: {lines}")
        if left := sorted(map(str, filter(Path.exists, self.files))):
            problems.append(f"left files: {left}")
        return problems


class Campaign:
    """Runs trials in one folder, against uninterrupted runs that are made once per set-up."""

    def __init__(self, folder: Path, plan: Plan, ends_at: float) -> None:
        self.folder, self.plan = prepare_workplace(folder), plan
        self.model = folder / "model"
        save_tiny_model(str(self.model), **VLLM_SHAPE)
        rows = (folder / "prompts.jsonl").read_text().splitlines()
        (folder / "held_out.jsonl").write_text("\n".join(rows[:2]) + "\n")
        self.whole: dict[str, AnnouncedRun] = {}
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # of ``whole``, by set-up
        self.ends_at = ends_at  # time.monotonic() at which no trial is made any more
        self.stopped = threading.Event()

    def launch_or_resume(self, output: Path, setup: str, restarts: bool = False) -> AnnouncedRun:
        """Start a run in the folder ``output``, or resume the one that has saved there, with the same command.

        It saves after every iteration and evaluates after every second.
        """
        checkpoints = output / "checkpoints"
        words = [
            *map(str, small_run(self.folder, self.model)),
            *("--num-rollout", str(ITERATIONS), "--save", str(checkpoints), "--save-interval", "1"),
            *(["--load", str(checkpoints)] if any(checkpoints.glob("iter_*")) else []),
            *("--eval-prompt-data", "held_out", str(self.folder / "held_out.jsonl"), "--eval-interval", "2"),
            *("--save-debug-rollout-data", str(output / "groups_{iteration}.jsonl"), "--worker-timeout", "30"),
            *("--no-report", "--use-fault-tolerance", *SETUPS[setup], *(["--max-restarts", "1"] if restarts else [])),
        ]
        logs = output / f"launch_{sum(1 for _ in output.glob('launch_*'))}"
        paths = [str(Path(__file__).with_name("announcing")), str(ROOT), importing_from(self.folder)]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        return AnnouncedRun(output, logs, words, environment)

    def reference(self, setup: str) -> AnnouncedRun:
        """Return the uninterrupted run of ``setup``."""
        with self.locks[setup]:
            if setup not in self.whole:
                run = self.launch_or_resume(self.folder / ("whole_" + setup.replace(", ", "_")), setup)
                try:
                    self.wait_until(run.has_ended, MOMENT_SECONDS)
                finally:
                    run.kill()
                if run.process.returncode != 0 or not run.count("save"):
                    raise RuntimeError(f"the uninterrupted run failed: {run.last_line()}; see {run.logs}")
                self.whole[setup] = run
        return self.whole[setup]

    def run_lanes(self, lanes: int, seed: int, trials: int, results: Path, keep: Path | None) -> None:
        """Run series in several threads until ``trials`` are made, the time is over or the campaign is stopped."""
        numbers = itertools.count()
        made: list[Trial] = []

        def run_lane() -> None:
            while len(made) < trials and time.monotonic() < self.ends_at:
                number = next(numbers)
                series = Series(self, random.Random(f"{seed} {number}"), self.folder / f"series_{number}")
                series.run()
                made.extend(trial for trial, _ in series.results)
                append(results, series)
                if series.problems and keep:
                    shutil.copytree(series.output, keep / f"{seed}_{number}")
                shutil.rmtree(series.output)

        with ThreadPoolExecutor(lanes) as pool:
            running = [pool.submit(run_lane) for _ in range(lanes)]
            try:
                for lane in as_completed(running):
                    lane.result()
            finally:
                self.stopped.set()  # one that failed stops the others

    def stop(self) -> None:
        """Make no more trials and let the runs end; the second time, end them and forget their series."""
        if self.ends_at < time.monotonic():
            self.stopped.set()
        self.ends_at = time.monotonic()

    def wait_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``holds()``. Return False after ``seconds``; raise CampaignStopped if the campaign is stopped."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            if self.stopped.wait(0.05):
                raise CampaignStopped
        return True


class Series:
    """Trials on a run, and on those that resume it, until one reaches its end."""

    def __init__(self, campaign: Campaign, rng: random.Random, output: Path) -> None:
        self.campaign, self.rng, self.output = campaign, rng, output
        self.setup, self.restarts = campaign.plan.setup(rng), rng.random() < 0.3
        self.results: list[tuple[Trial, Outcome]] = []
        self.unguarded: AnnouncedRun | None = None  # killed with its guard: the next run removes its remains

    @property
    def problems(self) -> list[str]:
        """The problems of the last trial. None of those before it had any."""
        return self.results[-1][1].problems if self.results else []

    def run(self) -> None:
        """Make the trials, then compare what was trained with the uninterrupted run."""
        whole, status = self.campaign.reference(self.setup), None
        try:
            while status != 0 and not self.problems:
                status = self._run_once()
        finally:
            if self.unguarded is not None:
                self.unguarded.kill()
        if not self.problems and self.results:
            self.problems.extend(row_problems(self.setup, self.output, whole))

    def _run_once(self) -> int | None:
        """Start the run, or resume it, and send signals until it ends. Return its exit status, None if it hangs."""
        run = self.campaign.launch_or_resume(self.output, self.setup, self.restarts)
        plan, resumes = self.campaign.plan, bool(self.results)
        try:
            while not self.problems and not run.has_ended() and self._may_try():
                trial, resumes = plan.trial(self.rng, self.setup, resumes, self.restarts), False
                target = self._send(trial, run)
                if target is None:
                    plan.give_back(trial)
                elif not self._continues(trial, target, run):
                    return self._end(run, trial)
            return self._end(run, None)
        finally:
            if run is not self.unguarded:
                run.kill()

    def _may_try(self) -> bool:
        return len(self.results) < SERIES and time.monotonic() < self.campaign.ends_at

    def _check_unguarded(self) -> None:
        """Note the remains of the last trial's run, which was killed with its guard, after the start of another run."""
        if self.unguarded is not None:
            self.problems.extend(self.unguarded.end_problems())
            self.unguarded.kill()
            self.unguarded = None

    def _send(self, trial: Trial, run: AnnouncedRun) -> psutil.Process | None:
        """Wait for the moment of a trial and send its signal. Return the process that got it, None if there is none."""
        begins = run.count(trial.moment) + trial.occurrence
        if not self.campaign.wait_until(lambda: run.has_ended() or run.count(trial.moment) >= begins, MOMENT_SECONDS):
            raise RuntimeError(f"{trial.name}: the run does not get there; see {run.logs}")
        time.sleep(trial.delay)
        run.note_files()
        self._check_unguarded()
        return None if self.problems else send(trial, run)

    def _continues(self, trial: Trial, target: psutil.Process, run: AnnouncedRun) -> bool:
        """Wait until a run continues or ends after a signal, and note the trial. Return whether it continues."""
        outcome, began = Outcome(), time.monotonic()
        self.results.append((trial, outcome))
        loads = run.count(LOAD) + (trial.target in REPLACED_BY_RESTART)
        enough: list[int] = []  # saves, counted from the moment at which the target was gone or replaced

        def continues() -> bool:
            if not enough and (trial.is_pause or is_gone(target)) and run.count(LOAD) >= loads:
                enough.append(run.count("save") + SAVES)
            return bool(enough) and run.count("save") >= enough[0]

        if not self.campaign.wait_until(lambda: run.has_ended() or continues(), END_SECONDS):
            outcome.problems.append(f"neither ended nor continued after {END_SECONDS} s")
        outcome.seconds = round(time.monotonic() - began, 1)
        return not outcome.problems and not run.has_ended()

    def _end(self, run: AnnouncedRun, killed_by: Trial | None) -> int | None:
        """Wait for the end of a run and note its problems, and its end if the last trial has caused it."""
        if self.problems:
            return None
        if not self.campaign.wait_until(run.has_ended, MOMENT_SECONDS):
            raise RuntimeError(f"the run does not end; see {run.logs}")
        self._check_unguarded()
        status, last = run.process.returncode, run.last_line()
        if killed_by and killed_by.target == "launcher and guard" and status != 0:
            self.unguarded, problems = run, []
        else:
            problems = run.end_problems()
        if killed_by:
            self.results[-1][1].status, self.results[-1][1].last = status, last
            problems += sentence_problems(killed_by, status, last)
        elif status != 0:
            problems.append(f"status {status}, and nothing was killed: {last}")
        if problems and not self.results:
            raise RuntimeError(f"a run that got no signal has problems: {problems}; see {run.logs}")
        self.problems.extend(problems)
        return status


def row_problems(setup: str, output: Path, whole: Launch) -> list[str]:
    """Compare the finished run in the folder ``output`` with the uninterrupted one."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["step"]]
    if sorted(steps) != list(range(1, ITERATIONS * STEPS + 1)):
        return [f"steps {steps}, not 1 to {ITERATIONS * STEPS}"]
    problems = []
    repeats = "torch" in setup and "async" not in setup
    expected = whole.rows()
    for row in (row for row in rows if row["step"] and repeats):
        metrics, right = trained(row), trained(expected[row["step"]])
        differing = [name for name in right if metrics.get(name) != right[name]]
        if differing:
            problems.append(f"step {row['step']} differs: {differing[:5]}")
    if prompts_of(output) != prompts_of(whole.output):
        problems.append("the prompts of the iterations differ")
    return problems


def prompts_of(output: Path) -> list[list[tuple[int, str]]]:
    """Return the index and the prompt of each group, by iteration."""
    files = [(output / f"groups_{iteration}.jsonl").read_text().splitlines() for iteration in range(ITERATIONS)]
    return [[(group["group_index"], group["prompt"]["text"]) for group in map(json.loads, lines)] for lines in files]


def is_gone(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not noticed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def send(trial: Trial, run: Launch) -> psutil.Process | None:
    """Send the signal to one process of the target, and return it. Return None if the run has no such process now."""
    sought = TARGETS[trial.target][0]
    for process in run.left():
        try:
            # A launcher that has restarted has another command line.
            if process.pid == run.process.pid if trial.is_to_launcher else kind_of(process) == sought:
                if trial.target == "launcher and guard":
                    next(each for each in process.children() if GUARD in each.cmdline()).kill()
                process.send_signal(SIGNALS[trial.signal])
                break
        except (psutil.NoSuchProcess, StopIteration):
            continue
    else:
        return None
    if trial.is_pause:
        time.sleep(PAUSE_SECONDS)
        run.process.send_signal(signal.SIGCONT)
    return process


def sentence_problems(trial: Trial, status: int, last: str) -> list[str]:
    """Return the faults in the exit status and the last line, given the killed target."""
    if trial.is_to_launcher:
        number = SIGNALS[trial.signal]
        wanted = {"KILL": -number, "STOP": 0}.get(trial.signal, 128 + number)
        if status not in (wanted, 0):
            return [f"status {status} instead of {wanted}: {last}"]
        who = "the user" if trial.signal == "INT" else number.name
        if status > 0 and not last.startswith(f"stopped by {who}; "):
            return [f"the last line does not say what stopped the run: {last}"]
        return []
    if status == 0:
        return []
    blamed = TARGETS[trial.target][1]
    if status != 1 or not last.startswith("train.py: the run stopped: ") or not re.search(blamed, last):
        return [f"status {status}, and the last line does not blame {blamed}: {last}"]
    return []


def append(path: Path, series: Series) -> None:
    """Append the trials of a series to the results, and print them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for trial, outcome in series.results:
        line = json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)})
        with path.open("a") as file:
            file.write(line.replace(str(series.campaign.folder), "FOLDER") + "\n")
        print(f"{trial.name}: {outcome.seconds} s, {outcome.problems or 'ok'}", flush=True)


def tables(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown tables: by target and signal, by set-up, and by moment."""
    by = (("target", "signal"), ("setup",), ("moment",))
    return "\n\n".join(table(results, keys) for keys in by)


def table(results: list[dict[str, Any]], keys: Sequence[str]) -> str:
    """Return the results as a Markdown table with a row for each value of the fields ``keys`` of a trial.

    The longest time is of a trial without a problem, in seconds.
    """
    cells: dict[tuple[str, ...], Counter[str]] = {}
    for each in results:
        trial, outcome = each["trial"], each["outcome"]
        count = cells.setdefault(tuple(trial[key] for key in keys), Counter())
        has_continued = outcome["status"] in (0, None)
        kind = "problems" if outcome["problems"] else "continued" if has_continued else "ended and resumed"
        count.update(("tried", kind))
        if not outcome["problems"]:
            count["longest (s)"] = max(count["longest (s)"], round(outcome["seconds"]))
    columns = ("tried", "continued", "ended and resumed", "problems", "longest (s)")
    lines = [f"| {' | '.join((*keys, *columns))} |", "|---" * (len(keys) + len(columns)) + "|"]
    for key, count in sorted(cells.items()):
        lines.append(f"| {' | '.join((*key, *(str(count[column]) for column in columns)))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one per trial; appended to")
    parser.add_argument("--trials", type=int, default=10, help="start no series after so many trials of this call")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no trial after this time")
    parser.add_argument("--lanes", type=int, default=2, help="series at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="copy the files of a series with a problem into this folder")
    parser.add_argument("--setups", default="", metavar="PART", help="only set-ups with this in their name, like torch")
    parser.add_argument("--table", action="store_true", help="print tables of the results and end")
    options = parser.parse_args()
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    if options.table:
        print(tables(known))
        return 0
    setups = [setup for setup in SETUPS if options.setups in setup]
    if not setups:
        parser.error(f"--setups {options.setups}: no set-up has this in its name; there are: {'; '.join(SETUPS)}")
    plan = Plan((Trial(**each["trial"]).kind for each in known), setups)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), plan, time.monotonic() + 60 * options.minutes)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: campaign.stop())
        try:
            campaign.run_lanes(options.lanes, options.seed, options.trials, options.results, options.keep)
        except CampaignStopped:
            print("the campaign was stopped; series that were running are not in the results", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
