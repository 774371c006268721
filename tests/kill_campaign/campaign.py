"""Kill processes of runs at random moments, and check how each run ends and resumes.

    python tests/kill_campaign/campaign.py --results tests/kill_campaign/results.jsonl --trials 50
    python tests/kill_campaign/campaign.py --results tests/kill_campaign/results.jsonl --table    what was tried so far

A trial starts a run of a tiny model, waits until a phase of its loop begins, sends a signal to one process, and then
checks that the run ends or continues within a bound, that the last line blames what was killed, that no process and no
file is left, and that the run, resumed if it ended early, has the rows of metrics.jsonl of an uninterrupted one (or,
where responses do not repeat, its prompts) and has trained on every prompt once.

A trial appends one line to the results. Trials that are there already are not tried again, so a campaign
that was stopped continues.
"""

from __future__ import annotations

import argparse
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
from dataclasses import asdict
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fast" / "support")]

import psutil  # noqa: E402

from miles.stacks import RUN_FOLDER  # noqa: E402
from tests.fast.cluster.runs.launches import Launch, importing_from, prepare_workplace, small_run  # noqa: E402
from tests.fast.conftest import save_tiny_model  # noqa: E402
from tests.kill_campaign.trials import SETUPS, SIGNALS, TARGETS, Trial, trials  # noqa: E402

ITERATIONS, STEPS = 4, 2
END_SECONDS = 240  # from the signal to the end of the run, whether it stops or continues; the machine may be busy
LEFT_SECONDS = 5  # from the end of the launcher to the end of everything else
PAUSE_SECONDS = 3  # a stopped launcher continues after this
STATUS_OF_TERM = 143


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


def compared(row: dict[str, float]) -> dict[str, float]:
    """Return a row without times, and without what the first step of every process has once more."""
    return {name: value for name, value in row.items() if not name.startswith(("time/", "perf/", "train/loss_mass"))}


class Campaign:
    """Runs trials in one folder, against uninterrupted runs that are made once per set-up."""

    def __init__(self, folder: Path) -> None:
        self.folder = prepare_workplace(folder)
        self.model = folder / "model"
        save_tiny_model(str(self.model))
        rows = (folder / "prompts.jsonl").read_text().splitlines()
        (folder / "held_out.jsonl").write_text("\n".join(rows[:2]) + "\n")
        self.whole: dict[str, Launch] = {}

    def launch(self, name: str, setup: str, *flags: str) -> Launch:
        """Start a run in its folder ``name``, which saves after every iteration and evaluates after every second."""
        output = self.folder / name
        words = [
            *small_run(self.folder, self.model),
            *("--num-rollout", str(ITERATIONS), "--save", str(output / "checkpoints"), "--save-interval", "1"),
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
            run = self.launch("whole " + setup.replace(", ", "_"), setup)
            if run.wait() != 0:
                raise RuntimeError(f"the uninterrupted run failed: {run.err[-2000:]}")
            self.whole[setup] = run
        return self.whole[setup]

    def run_trial(self, trial: Trial) -> dict[str, object]:
        """Run one trial and return what happened; ``problems`` is empty if all is as it should be."""
        whole = self.reference(trial.setup)
        name = trial.folder_name
        shutil.rmtree(self.folder / name, ignore_errors=True)
        flags = ["--max-restarts", "1"] if trial.restarts else []
        loaded = []
        if trial.moment == "load":
            (self.folder / name).mkdir()
            checkpoints = self.folder / name / "checkpoints"
            shutil.copytree(whole.output / "checkpoints" / "iter_0000001", checkpoints / "iter_0000001")
            for groups in whole.output.glob("groups_0.jsonl"):
                shutil.copy(groups, self.folder / name)
            loaded = ["--load", str(checkpoints)]
        run = self.launch(name, trial.setup, *flags, *loaded)
        try:
            return self._watch(trial, run, whole, flags)
        finally:
            run.kill()

    def _watch(self, trial: Trial, run: Launch, whole: Launch, flags: list[str]) -> dict[str, object]:
        problems: list[str] = []
        self._wait_for_moment(trial, run)
        folder = folder_of(run)
        hit = send(trial, run)
        began = time.monotonic()
        try:
            run.out, run.err = run.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return {"hit": hit, "seconds": END_SECONDS, "problems": [f"still running after {END_SECONDS} s"]}
        seconds = round(time.monotonic() - began, 1)
        status, last = run.process.returncode, (run.err.strip().splitlines() or [""])[-1]
        if hit:
            problems += sentence_problems(trial, status, last)
        elif status != 0:
            problems.append(f"status {status}, and nothing was killed: {last}")
        if not run.none_left(LEFT_SECONDS):
            problems.append(f"left after {LEFT_SECONDS} s: {[' '.join(p.cmdline())[:60] for p in run.left()]}")
        if folder is not None and folder.exists():
            problems.append(f"left files: {sorted(path.name for path in folder.iterdir())}")
        if status != 0:
            problems += self._resume_problems(trial, run, flags)
        problems += self._row_problems(trial, run, whole) if not problems else []
        return {"hit": hit, "seconds": seconds, "status": status, "last": last, "problems": problems}

    def _wait_for_moment(self, trial: Trial, run: Launch) -> None:
        line, announced = f"{trial.moment} {trial.occurrence}", run.output / "announced"
        run.wait_until(lambda: announced.exists() and line in announced.read_text().splitlines(), seconds=300)
        time.sleep(trial.delay)  # the random moment

    def _resume_problems(self, trial: Trial, run: Launch, flags: list[str]) -> list[str]:
        """Resume as the last line says, with the same command and ``--load``."""
        checkpoints = run.output / "checkpoints"
        has_saved = any(checkpoints.glob("iter_*"))
        resumed = self.launch(
            run.output.name, trial.setup, *flags, *(["--load", str(checkpoints)] if has_saved else [])
        )
        try:
            resumed.out, resumed.err = resumed.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"the resumed run did not end within {END_SECONDS} s"]
        finally:
            resumed.kill()
        return [] if resumed.process.returncode == 0 else [f"the resumed run failed: {resumed.err.splitlines()[-1]}"]

    def _row_problems(self, trial: Trial, run: Launch, whole: Launch) -> list[str]:
        """Compare the finished run with the uninterrupted one."""
        steps = [json.loads(line)["step"] for line in (run.output / "metrics.jsonl").read_text().splitlines()]
        first = STEPS + 1 if trial.moment == "load" else 1  # the first iteration was trained by another run
        wanted = list(range(first, ITERATIONS * STEPS + 1))
        if sorted(step for step in steps if step) != wanted:
            return [f"steps {steps}, not {wanted}"]
        problems = []
        repeats = "sglang" not in trial.setup and "async" not in trial.setup
        for step in wanted if repeats else []:
            found, right = compared(run.rows()[step]), compared(whole.rows()[step])
            differing = [name for name in right if found.get(name) != right[name]]
            if differing:
                problems.append(f"step {step} differs: {differing[:5]}")
        found_groups, whole_groups = (
            [
                [(group["group_index"], group["prompt"]["text"]) for group in map(json.loads, lines)]
                for iteration in range(ITERATIONS)
                if (lines := (each.output / f"groups_{iteration}.jsonl").read_text().splitlines())
            ]
            for each in (run, whole)
        )
        if found_groups != whole_groups:
            problems.append("the prompts of the iterations differ")
        return problems


def send(trial: Trial, run: Launch) -> bool:
    """Send the signal to one process of the target. Return False if the run has no such process now."""
    sought = TARGETS[trial.target][0]
    for process in run.left():
        try:
            is_target = sought in process.name() or any(sought in word for word in process.cmdline()[:4])
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
        assert isinstance(trial, dict) and isinstance(outcome, dict)
        count = cells.setdefault((trial["setup"], trial["target"], trial["signal"]), Counter())
        count["tried"] += 1
        kind = "problems" if outcome["problems"] else "continued" if outcome["status"] == 0 else "ended and resumed"
        count[kind] += 1
    columns = ("tried", "continued", "ended and resumed", "problems")
    lines = ["| set-up | target | signal | " + " | ".join(columns) + " |", "|---" * (3 + len(columns)) + "|"]
    for key, count in sorted(cells.items()):
        lines.append("| " + " | ".join([*key, *(str(count[column]) for column in columns)]) + " |")
    return "\n".join(lines)


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
        for trial in islice(trials(given.seed), len(known), len(known) + given.trials):
            if time.monotonic() > until:
                break
            try:
                outcome = campaign.run_trial(trial)
            except AssertionError as error:  # of Launch.wait_until
                outcome = {"hit": False, "status": None, "problems": [str(error)[-1000:]]}
            line = json.dumps({"trial": asdict(trial), "outcome": outcome}).replace(folder, "FOLDER")
            with given.results.open("a") as file:
                file.write(line + "\n")
            print(f"{trial.name}: {outcome['problems'] or 'ok'}", flush=True)
            if not outcome["problems"]:
                shutil.rmtree(Path(folder) / trial.folder_name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
