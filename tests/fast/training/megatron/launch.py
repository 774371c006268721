"""Runs every check on every layout, on real ranks over gloo: ``python launch.py FOLDER [LAYOUT...]``.

Results: FOLDER/results.json. The ranks are forked from one process that has imported everything, as importing costs
far more than checking.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from miles.training.megatron.cpu_support import support_cpu

support_cpu()

import checks  # noqa: E402  # Megatron is imported from here on
from layouts import LAYOUTS, Stand, save_models  # noqa: E402

DEADLINE = timedelta(seconds=90)


def _run_rank(stand: Stand) -> None:
    torch.set_num_threads(1)
    ranks = stand.layout.ranks
    store = dist.FileStore(str(stand.folder / f"store_{stand.name}"), ranks)
    dist.init_process_group("gloo", store=store, rank=stand.rank, world_size=ranks, timeout=DEADLINE)
    outcomes = {}
    for check in checks.CHECKS:
        started = time.perf_counter()
        try:
            check(stand)
            outcomes[check.__name__] = ""
        except Exception:  # reported by the test of this name
            outcomes[check.__name__] = f"rank {stand.rank} of {stand.name}\n{traceback.format_exc()}"
        if stand.rank == 0:
            print(f"{stand.name} {check.__name__} {time.perf_counter() - started:.1f} s", flush=True)
    (stand.folder / f"outcomes_{stand.name}_{stand.rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def _run_layout(folder: Path, name: str) -> dict[str, str]:
    """What failed on each check, empty where all ranks agree that it holds."""
    fork = multiprocessing.get_context("fork")
    stands = [Stand(folder, name, rank) for rank in range(LAYOUTS[name].ranks)]
    ranks = [fork.Process(target=_run_rank, args=(stand,)) for stand in stands]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE.total_seconds())
    for process in ranks:
        process.kill()
    found = {check.__name__: "" for check in checks.CHECKS}
    for stand in stands:
        report = folder / f"outcomes_{name}_{stand.rank}.json"
        outcomes = json.loads(report.read_text()) if report.exists() else {}
        for check in found:
            found[check] += outcomes.get(check, f"rank {stand.rank} of {name} did not finish\n")
    return found


def main(folder: Path, names: list[str]) -> None:
    save_models(folder)
    results = {name: _run_layout(folder, name) for name in names or LAYOUTS}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
