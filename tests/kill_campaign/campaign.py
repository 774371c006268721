"""Kill processes of runs at random moments, and check how each run ends and resumes.

    python tests/kill_campaign/campaign.py --results tests/kill_campaign/results.jsonl --trials 50
    python tests/kill_campaign/campaign.py --results tests/kill_campaign/results.jsonl --table    what was tried so far

A trial waits until a phase of the loop of a run begins, sends a signal to one process, and then checks that the run
ends or continues within a bound, that the last line blames what was killed, and that no process and no file is left. A
series of trials starts with a run of a tiny model. If a trial ends it, the next one is made on the run that resumes it.
At the end the last run is left alone, and must have the rows of metrics.jsonl of an uninterrupted one (or, where
responses do not repeat, its prompts) and have trained on every prompt once. A fault of that is a problem of the last
trial.

A trial appends one line to the results. A campaign that was stopped continues after the trials in them. Several
campaigns may run at the same time, with results and a seed of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fast" / "support")]

import psutil  # noqa: E402

from miles.stacks import RUN_FOLDER  # noqa: E402
from tests.fast.cluster.runs.launches import Launch, importing_from, prepare_workplace, small_run, trained  # noqa: E402
from tests.fast.conftest import save_tiny_model  # noqa: E402
from tests.kill_campaign.trials import SETUPS, SIGNALS, TARGETS, Trial, random_series, strata  # noqa: E402

ITERATIONS, STEPS = 4, 2
MOMENT_SECONDS = 300  # from the start of a run to the moment
END_SECONDS = 240  # from the signal to the end of the run, whether it stops or continues; the machine may be busy
LEFT_SECONDS = 5  # from the end of the launcher to the end of everything else
PAUSE_SECONDS = 3  # a stopped launcher continues after this
STATUS_OF_TERM = 143

Outcome = dict[str, Any]  # hit, seconds, status, last, problems


def folder_of(run: Launch) -> Path | None:
    """Return the temporary folder of a run, from the environment of its processes."""
    for process in run.left():
        try:
            folder = process.environ().get(RUN_FOLDER)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if folder:
            return Path(folder)
    return None


class Campaign:
    """Runs trials in one folder, against uninterrupted runs that are made once per set-up."""

    def __init__(self, folder: Path) -> None:
        self.folder = prepare_workplace(folder)
        self.model = folder / "model"
        save_tiny_model(str(self.model))
        rows = (folder / "prompts.jsonl").read_text().splitlines()
        (folder / "held_out.jsonl").write_text("\n".join(rows[:2]) + "\n")
        self.whole: dict[str, Launch] = {}

    def launch_or_resume(self, name: str, setup: str, flags: Sequence[str] = ()) -> Launch:
        """Start a run in its folder ``name``, or resume the one that has saved there, with the same command.

        It saves after every iteration and evaluates after every second.
        """
        output = self.folder / name
        (output / "announced").unlink(missing_ok=True)
        checkpoints = output / "checkpoints"
        words = [
            *small_run(self.folder, self.model),
            *("--num-rollout", str(ITERATIONS), "--save", str(checkpoints), "--save-interval", "1"),
            *(["--load", str(checkpoints)] if any(checkpoints.glob("iter_*")) else []),
            *("--eval-prompt-data", "held_out", str(self.folder / "held_out.jsonl"), "--eval-interval", "2"),
            *("--save-debug-rollout-data", str(output / "groups_{iteration}.jsonl"), "--worker-timeout", "30"),
            *("--no-report", "--use-fault-tolerance", *SETUPS[setup], *flags),
        ]
        environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{importing_from(self.folder)}"}
        program = ROOT / "tests" / "kill_campaign" / "announced_train.py"
        return Launch(output, words, program, ANNOUNCED=str(output / "announced"), **environment)

    def reference(self, setup: str) -> Launch:
        """Return the uninterrupted run of ``setup``."""
        if setup not in self.whole:
            run = self.launch_or_resume("whole " + setup.replace(", ", "_"), setup)
            if run.wait() != 0:
                raise RuntimeError(f"the uninterrupted run failed: {run.err[-2000:]}")
            self.whole[setup] = run
        return self.whole[setup]

    def run_series(self, series: list[Trial]) -> list[tuple[Trial, Outcome]]:
        """Run the trials of a series until a run reaches its end, and return what happened in each.

        ``problems`` is empty if all is as it should be. If a moment does not come, or the run has no process of the
        target then, there is no trial.
        """
        first = series[0]
        whole = self.reference(first.setup)
        folder, flags = self.folder / first.folder_name, ["--max-restarts", "1"] if first.restarts else []
        shutil.rmtree(folder, ignore_errors=True)
        if first.moment == "load":
            shutil.copytree(whole.output / "checkpoints" / "iter_0000001", folder / "checkpoints" / "iter_0000001")
            shutil.copy(whole.output / "groups_0.jsonl", folder)
        results: list[tuple[Trial, Outcome]] = []
        for trial in [*series, None]:
            run = self.launch_or_resume(folder.name, first.setup, flags)
            try:
                outcome = self._watch(trial, run)
            finally:
                run.kill()
            if trial and (outcome["hit"] or (outcome["problems"] and not results)):
                results.append((trial, outcome))
            elif results:  # the run resumed the one before it to the end
                results[-1][1]["problems"].extend(outcome["problems"])
            if outcome["problems"] or outcome["status"] == 0:
                break
        if results and not results[-1][1]["problems"]:
            results[-1][1]["problems"].extend(row_problems(first, folder, whole))
        return results

    def _watch(self, trial: Trial | None, run: Launch) -> Outcome:
        """Make a trial on a run, if its moment comes, and check how the run ends."""
        outcome: Outcome = {"hit": False, "seconds": None, "status": None, "last": "", "problems": []}
        problems, folder = outcome["problems"], None
        if trial:
            reached = self._has_reached(trial, run)
            folder = folder_of(run)
            outcome["hit"] = reached and send(trial, run)
        began = time.monotonic()
        try:
            run.out, run.err = run.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            problems.append(f"still running after {END_SECONDS} s")
            return outcome
        outcome["seconds"] = round(time.monotonic() - began, 1)
        outcome["status"] = status = run.process.returncode
        outcome["last"] = last = (run.err.strip().splitlines() or [""])[-1]
        if trial and outcome["hit"]:
            problems += sentence_problems(trial, status, last)
        elif status != 0:
            problems.append(f"status {status}, and nothing was killed: {last}")
        if not run.none_left(LEFT_SECONDS):
            problems.append(f"left after {LEFT_SECONDS} s: {[' '.join(p.cmdline())[:60] for p in run.left()]}")
        if folder is not None and folder.exists():
            problems.append(f"left files: {sorted(path.name for path in folder.iterdir())}")
        return outcome

    def _has_reached(self, trial: Trial, run: Launch) -> bool:
        """Wait for the random moment of a trial. Return False if the run ends before, or does not get there."""
        line, announced = f"{trial.moment} {trial.occurrence}", run.output / "announced"
        deadline = time.monotonic() + MOMENT_SECONDS
        while not (announced.exists() and line in announced.read_text().splitlines()):
            if run.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        time.sleep(trial.delay)
        return True


def row_problems(first: Trial, output: Path, whole: Launch) -> list[str]:
    """Compare the finished run in the folder ``output`` with the uninterrupted one."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["step"]]
    first_step = STEPS + 1 if first.moment == "load" else 1  # the first iteration was trained by another run
    wanted = list(range(first_step, ITERATIONS * STEPS + 1))
    if sorted(steps) != wanted:
        return [f"steps {steps}, not {wanted}"]
    problems = []
    repeats = "sglang" not in first.setup and "async" not in first.setup
    expected = whole.rows()
    for row in (row for row in rows if row["step"] and repeats):
        found, right = trained(row), trained(expected[row["step"]])
        differing = [name for name in right if found.get(name) != right[name]]
        if differing:
            problems.append(f"step {row['step']} differs: {differing[:5]}")
    if prompts_of(output) != prompts_of(whole.output):
        problems.append("the prompts of the iterations differ")
    return problems


def prompts_of(output: Path) -> list[list[tuple[int, str]]]:
    """Return the index and the prompt of each group, by iteration."""
    files = [(output / f"groups_{iteration}.jsonl").read_text().splitlines() for iteration in range(ITERATIONS)]
    return [[(group["group_index"], group["prompt"]["text"]) for group in map(json.loads, lines)] for lines in files]


def send(trial: Trial, run: Launch) -> bool:
    """Send the signal to one process of the target. Return False if the run has no such process now."""
    sought = TARGETS[trial.target][0]
    for process in run.left():
        try:
            is_target = sought in process.name() or any(sought in word for word in process.cmdline()[:5])
            if trial.target == "launcher":
                is_target = process.pid == run.process.pid
            if is_target:
                process.send_signal(SIGNALS[trial.signal])
                break
        except psutil.NoSuchProcess:
            continue
    else:
        return False
    if trial.target == "launcher" and trial.signal == "STOP":
        time.sleep(PAUSE_SECONDS)
        run.process.send_signal(signal.SIGCONT)
    return True


def sentence_problems(trial: Trial, status: int, last: str) -> list[str]:
    """Return what is wrong with the exit status and the last line, for what was killed."""
    if trial.target == "launcher":
        wanted = {"KILL": -signal.SIGKILL, "TERM": STATUS_OF_TERM, "STOP": 0}[trial.signal]
        if status not in (wanted, 0):
            return [f"status {status} instead of {wanted}: {last}"]
        if status == STATUS_OF_TERM and not last.startswith("stopped by SIGTERM; "):
            return [f"the last line does not say what stopped the run: {last}"]
        return []
    if status == 0:
        return []
    blamed = TARGETS[trial.target][1]
    if status != 1 or not last.startswith("train.py: the run stopped: ") or not re.search(blamed, last):
        return [f"status {status}, and the last line does not blame {blamed}: {last}"]
    return []


def table(results: list[dict[str, object]]) -> str:
    """Return the results as a Markdown table by set-up, target and signal."""
    cells: dict[tuple[str, ...], Counter[str]] = {}
    for each in results:
        trial, outcome = each["trial"], each["outcome"]
        count = cells.setdefault((trial["setup"], trial["target"], trial["signal"]), Counter())
        count["tried"] += 1
        kind = "problems" if outcome["problems"] else "continued" if outcome["status"] == 0 else "ended and resumed"
        count[kind] += 1
    columns = ("tried", "continued", "ended and resumed", "problems")
    lines = ["| set-up | target | signal | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for key, count in sorted(cells.items()):
        lines.append("| " + " | ".join([*key, *(str(count[column]) for column in columns)]) + " |")
    return "\n".join(lines)


def next_series(seed: int, number: int) -> list[Trial]:
    """Return the series ``number`` of a campaign: one of the strata, then random ones."""
    each_once = strata(seed)
    return each_once[number : number + 1] or random_series(seed, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one per trial; appended to")
    parser.add_argument("--trials", type=int, default=10, help="trials of this call")
    parser.add_argument("--minutes", type=float, help="start no trial after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the table of the results and end")
    given = parser.parse_args()
    known = [json.loads(line) for line in given.results.read_text().splitlines()] if given.results.exists() else []
    if given.table:
        print(table(known))
        return 0
    given.results.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * given.minutes if given.minutes else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        done = 0
        for number in itertools.count(len(known)):
            if done >= given.trials or time.monotonic() > until:
                break
            for trial, outcome in campaign.run_series(next_series(given.seed, number)):
                line = json.dumps({"trial": asdict(trial), "outcome": outcome}).replace(folder, "FOLDER")
                with given.results.open("a") as file:
                    file.write(line + "\n")
                print(f"{trial.name}: {outcome['problems'] or 'ok'}", flush=True)
                done += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
