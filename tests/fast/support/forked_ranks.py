"""Runs checks on forked ranks over gloo, and collects what failed.

Ranks are forked from a process that has imported everything, as importing costs far more than checking.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import multiprocessing.connection
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_device import WORKERS, share_gloo_device

DEADLINE = timedelta(seconds=400)  # of all checks of a group, on a busy machine; they take about 30 s on an idle one
WAIT = timedelta(seconds=120)  # of one rank for the others
Check = Callable[[Any], "str | None"]  # called with the description of its rank; raises, or returns a fault


def error_of(kind: type[Exception], function: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of the error that a call raises; empty if none: ``pytest.raises`` would end the rank."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    return ""


def run_on_ranks(
    folder: Path,
    name: str,
    ranks: Sequence[Any],
    checks: Mapping[str, Check],
    together: Callable[[list[str]], str] = "".join,
    at_the_end: Callable[[Any], None] = lambda rank: None,
    deadline: timedelta = DEADLINE,
    workers: int = WORKERS,
) -> dict[str, str]:
    """Run ``checks`` in one process for each of ``ranks``, which describe them.

    Args:
        folder: For files of the group ``name``, which may have run before.
        together: Combines the ranks' answers to a check.
        at_the_end: Called in each process after all checks.
        deadline: Of all checks.
        workers: Threads for the collective operations of each process group.

    Returns:
        What failed of each check, empty if all ranks agree that it holds.
    """
    for leftover in (*folder.glob(f"{name} ?.json"), folder / f"store of {name}"):
        leftover.unlink(missing_ok=True)

    def run_rank(number: int) -> None:
        torch.set_num_threads(1)
        share_gloo_device(workers)
        store = dist.FileStore(str(folder / f"store of {name}"), len(ranks))
        dist.init_process_group("gloo", store=store, rank=number, world_size=len(ranks), timeout=WAIT)
        outcomes = {}
        report = folder / f"{name} {number}.json"
        for title, check in checks.items():
            started = time.perf_counter()
            try:
                outcomes[title] = check(ranks[number]) or ""
            except Exception:  # reported by the test of this name
                outcomes[title] = f"rank {number} of {name}\n{traceback.format_exc()}"
            if number == 0:
                print(f"{name}: {title}: {time.perf_counter() - started:.1f} s", flush=True)
            report.with_suffix(".part").write_text(json.dumps(outcomes))
            report.with_suffix(".part").replace(report)  # whole at every moment: the process may be killed
        at_the_end(ranks[number])
        dist.destroy_process_group()

    gc.collect()
    gc.freeze()  # the ranks' collections pass over what was imported
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(number,)) for number in range(len(ranks))]
    for process in processes:
        process.start()
    ends = time.monotonic() + deadline.total_seconds()
    waiting = {process.sentinel: process for process in processes}
    while waiting and time.monotonic() < ends and not any(process.exitcode for process in processes):
        for sentinel in multiprocessing.connection.wait(list(waiting), max(0.0, ends - time.monotonic())):
            waiting.pop(sentinel).join()  # type: ignore[arg-type]
    ends = [how_it_ended(process.exitcode) for process in processes]  # before those that still wait are killed
    for process in processes:
        process.kill()
    said: dict[str, list[str]] = {check: [] for check in checks}
    for number in range(len(ranks)):
        report = folder / f"{name} {number}.json"
        outcomes = json.loads(report.read_text()) if report.exists() else {}
        for check, words in said.items():
            words.append(outcomes.get(check, f"rank {number} of {name} did not finish: {ends[number]}\n"))
    return {check: together(words) for check, words in said.items()}


def how_it_ended(exit_code: int | None) -> str:
    """Say how a process ended, by its exit code as ``multiprocessing`` has it: a signal's is negative."""
    if exit_code is None:
        return "it was still running when another rank failed, or when the time was over"
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"ended with status {exit_code}"
