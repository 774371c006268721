"""Train cases on three ranks again and again, and keep the stacks of every rank if one stalls.

    python tests/soak/three_ranks.py --results outputs/soak.jsonl --minutes 120

A pass starts three ranks and trains every layout of three ranks with every batch and aggregation mode, on-policy and
off-policy, in random order; each result is compared with the oracle. A pass appends one line to the results. A rank
that does not answer ends the pass, and the line has the stacks of all ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAST = ROOT / "tests" / "fast"
sys.path[:0] = [str(ROOT), str(FAST / "support"), str(FAST / "conformance")]

from cases import BATCHES, FULL, LAYOUTS, MODES, Case, loss_of  # noqa: E402
from compare import differences, off_policy, samples_of, wanted  # noqa: E402
from oracle import load_oracle  # noqa: E402
from ranks import Ranks, started_ranks  # noqa: E402

WORLD = 3


def cases(oracle: Any, rng: random.Random) -> list[Case]:
    """Return the cases of one pass, with random data."""
    all_cases = []
    for layout in (layout for layout in LAYOUTS.values() if layout.ranks == WORLD):
        for mode in MODES:
            for spec in BATCHES.values():
                seed = rng.randrange(10**6)
                all_cases.append(Case(spec, loss_of(mode), layout, seed, shuffled=True, watch=True))
                all_cases.append(off_policy(Case(spec, loss_of(mode, **FULL), layout, seed), oracle))
    rng.shuffle(all_cases)
    return all_cases


def run_pass(ranks: Ranks, oracle: Any, seed: int) -> tuple[int, str]:
    """Return the number of cases that were right, and what went wrong with the next one, if anything."""
    done = 0
    for case in cases(oracle, random.Random(seed)):
        try:
            (result,) = ranks.run(case)
        except AssertionError as error:
            return done, f"{case}\n{error}"
        if different := differences(result, *wanted(case, oracle, samples_of(case))):
            return done, f"{case}\n{different}"
        done += 1
    return done, ""


def main() -> int:
    """Run passes until the time is over; return 1 if one had a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one per pass; appended to")
    parser.add_argument("--minutes", type=float, default=120.0, help="start no pass after this time")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    until, problems = time.monotonic() + 60 * options.minutes, 0
    known = len(options.results.read_text().splitlines()) if options.results.exists() else 0
    while time.monotonic() < until:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, started_ranks(Path(folder), [WORLD]) as ranks:
            done, problem = run_pass(ranks, load_oracle(str(Path(folder) / "untied")), known)
        line = {"pass": known, "cases": done, "seconds": round(time.monotonic() - start, 1), "problem": problem}
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"pass {known}: {done} cases in {line['seconds']} s: {problem or 'ok'}", flush=True)
        problems += bool(problem)
        known += 1
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
