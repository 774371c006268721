"""Run every check on 1 and 2 real ranks over gloo: ``python launch.py FOLDER`` writes FOLDER/results.json.

The ranks are forked from one process that has imported everything, because importing takes much longer than a check.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import critic_checks
import state_checks
import torch
import torch.distributed as dist
from stage import Stage, save_models

WORLDS = (2, 1)  # 2 before 1: one rank loads what two saved
DEADLINE = timedelta(seconds=60)
CHECKS: dict[int, tuple[Callable[[Stage], None], ...]] = {
    1: state_checks.CHECKS + state_checks.AFTER_TWO_RANKS + critic_checks.CHECKS + critic_checks.AFTER_TWO_RANKS,
    2: state_checks.CHECKS + state_checks.ON_TWO_RANKS + critic_checks.CHECKS,
}


def _run_rank(stage: Stage) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(stage.folder / f"store{stage.world}"), stage.world)
    dist.init_process_group("gloo", store=store, rank=stage.rank, world_size=stage.world, timeout=DEADLINE)
    outcomes = {}
    for check in CHECKS[stage.world]:
        try:
            check(stage)
            outcomes[check.__name__] = ""
        except Exception:  # reported by the test of this name
            outcomes[check.__name__] = f"rank {stage.rank} of {stage.world}\n{traceback.format_exc()}"
    (stage.folder / f"outcomes_{stage.world}_{stage.rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def _run_world(folder: Path, world: int) -> dict[str, str]:
    """Return the failures of each check; empty if it passes on all ranks."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_run_rank, args=(Stage(folder, rank, world),)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE.total_seconds())
    for process in ranks:
        process.kill()
    found = {check.__name__: "" for check in CHECKS[world]}
    for rank in range(world):
        report = folder / f"outcomes_{world}_{rank}.json"
        outcomes = json.loads(report.read_text()) if report.exists() else {}
        for name in found:
            found[name] += outcomes.get(name, f"rank {rank} of {world} did not finish\n")
    return found


def main(folder: Path) -> None:
    save_models(folder)
    (folder / "results.json").write_text(json.dumps({world: _run_world(folder, world) for world in WORLDS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
