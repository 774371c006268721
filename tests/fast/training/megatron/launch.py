"""Run the checks of every layout on real ranks over gloo: ``python launch.py FOLDER [LAYOUT...]``.

FOLDER/results.json gets the failures by layout and check, FOLDER/measured.json the distances from the oracle. The ranks
are forked from one process that has imported everything and computed the oracle, because both take much longer than the
checks.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from miles.training.megatron.cpu_support import support_cpu

support_cpu()

import auxiliary_checks  # noqa: E402  # Megatron is imported from here on
import conformance_checks  # noqa: E402
import critic_checks  # noqa: E402
import fault_checks  # noqa: E402
import state_checks  # noqa: E402
from layouts import LAYOUTS, MEASURED, Stand, save_models  # noqa: E402

DEADLINE = timedelta(seconds=120)
Check = Callable[[Stand], "str | None"]


def checks_of(
    name: str,
    expected: dict[str, list[conformance_checks.Expected]],
    of_critic: critic_checks.Expectations,
    auxiliary: auxiliary_checks.Oracle,
) -> dict[str, Check]:
    """Return every check of the layout ``name``. A check raises, or returns what is wrong."""
    found: dict[str, Check] = {check.__name__: check for check in state_checks.OF_LAYOUT.get(name, ())}
    for model in LAYOUTS[name].models:
        for contract in conformance_checks.CONTRACTS:
            found[f"{model}, {contract}"] = partial(
                conformance_checks.conforms, model=model, contract=contract, expected=expected[model]
            )
    found |= fault_checks.checks_of(name, expected)
    return found | critic_checks.checks_of(name, of_critic) | auxiliary_checks.checks_of(name, auxiliary)


def _run_rank(stand: Stand, checks: dict[str, Check]) -> None:
    torch.set_num_threads(1)
    ranks = stand.layout.ranks
    store = dist.FileStore(str(stand.folder / f"store of {stand.name}"), ranks)
    dist.init_process_group("gloo", store=store, rank=stand.rank, world_size=ranks, timeout=DEADLINE)
    outcomes = {}
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            outcomes[name] = check(stand) or ""
        except Exception:  # reported by the test of this name
            outcomes[name] = f"rank {stand.rank} of {stand.name}\n{traceback.format_exc()}"
        if stand.rank == 0:
            print(f"{stand.name}: {name}: {time.perf_counter() - started:.1f} s", flush=True)
    (stand.folder / f"{stand.name} {stand.rank}.json").write_text(json.dumps(outcomes))
    (stand.folder / f"{stand.name} {stand.rank} measured.json").write_text(json.dumps(MEASURED))
    dist.destroy_process_group()


def run_layout(
    folder: Path, name: str, checks: dict[str, Check], together: Callable[[list[str]], str] = "".join
) -> dict[str, str]:
    """Return the failures of each check, empty if all ranks pass: the ranks' messages, combined by ``together``."""
    for leftover in (*folder.glob(f"{name} ?.json"), folder / f"store of {name}"):
        leftover.unlink(missing_ok=True)  # the layout may have run before
    fork = multiprocessing.get_context("fork")
    stands = [Stand(folder, name, rank) for rank in range(LAYOUTS[name].ranks)]
    ranks = [fork.Process(target=_run_rank, args=(stand, checks)) for stand in stands]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE.total_seconds()
    waiting = {process.sentinel: process for process in ranks}
    while waiting and time.monotonic() < deadline and not any(process.exitcode for process in ranks):
        for sentinel in multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic())):
            waiting.pop(sentinel).join()  # type: ignore[arg-type]
    for process in ranks:
        process.kill()
    said: dict[str, list[str]] = {check: [] for check in checks}
    for stand in stands:
        report = folder / f"{name} {stand.rank}.json"
        outcomes = json.loads(report.read_text()) if report.exists() else {}
        for check, words in said.items():
            words.append(outcomes.get(check, f"rank {stand.rank} of {name} did not finish\n"))
    return {check: together(words) for check, words in said.items()}


def main(folder: Path, names: list[str]) -> None:
    save_models(folder)
    auxiliary_checks.save_models(folder)
    expected = conformance_checks.expectations(folder)
    of_critic = critic_checks.expectations(folder)
    auxiliary = auxiliary_checks.Oracle(folder)
    results = {
        name: run_layout(folder, name, checks_of(name, expected, of_critic, auxiliary)) for name in names or LAYOUTS
    }
    (folder / "results.json").write_text(json.dumps(results))
    files = {name: folder / f"{name} 0 measured.json" for name in results}
    measured = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    (folder / "measured.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
