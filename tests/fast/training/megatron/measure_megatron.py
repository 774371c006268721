"""Measure distances from the oracle for rows of layout_grid.py on Megatron: ``measure_megatron.py FOLDER ROW...``.

FOLDER/distances.json has one number per column, null if the layout is refused.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import launch  # first: it lets Megatron run on CPU
from auxiliary_checks import KINDS as AUXILIARY
from auxiliary_checks import Oracle, checked_steps, save_models
from cases import FIXED, PADDED, context, dynamic
from conformance_checks import CONTRACTS
from layout_grid import DYNAMIC_BUDGET, KINDS, Kind, Split, refusal, splits
from layouts import LAYOUTS, Layout, RankProcess
from layouts import save_models as save_plain_models

from miles.config.megatron.settings import MegatronArguments
from miles.config.training import TrainingArguments

# The losses that the columns train, by the names of auxiliary_checks.py.
TRAINED = {"dense": "policy", "dense, MTP": "mtp"}


def layout_of(split: Split, expert_parallel: int, cut_experts: bool) -> Layout:
    whole_experts = expert_parallel > 1 and not cut_experts
    sizes = MegatronArguments(
        tensor_model_parallel_size=split.tp,
        sequence_parallel=split.sp,
        pipeline_model_parallel_size=split.pp,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=2 if cut_experts else 1 if split.tp > 1 and whole_experts else None,
    )
    if not split.cp:
        return Layout(split.ranks, sizes, dynamic(DYNAMIC_BUDGET), TrainingArguments())
    return Layout(split.ranks, sizes, PADDED if split.padded else context(split.cp), FIXED)


def distance(process: RankProcess, kind: str, steps: dict[str, Any]) -> str:
    """Return the largest distance over both contracts and both optimizers, as text."""
    worst = 0.0
    for contract in CONTRACTS:
        for sharded in (False, True):
            fields = AUXILIARY[kind][1] | {"use_distributed_optimizer": sharded}
            error, lines = checked_steps(process, kind, contract, steps[contract], fields)
            if lines and process.rank == 0:
                print(f"{process.name}: {kind}, {contract}, sharded {sharded}:", *lines, sep="\n  ", flush=True)
            worst = max(worst, error)
    return str(worst)


def _largest(said: list[str]) -> str:
    """Combine the ranks' numbers; a rank that failed has written something else."""
    return str(max(map(float, said)))


def measure(folder: Path, split: Split, oracle: Oracle) -> list[float | None]:
    """Return one number per column."""
    accepted = [kind for kind in KINDS["megatron"] if refusal(split, kind, folder) is None]
    by_kind: dict[Kind, float] = {}
    for experts in sorted({(kind.expert_parallel, kind.cut_experts) for kind in accepted}):  # each with its own groups
        kinds = [kind for kind in accepted if (kind.expert_parallel, kind.cut_experts) == experts]
        name = f"{split.name}, experts {experts}"
        LAYOUTS[name] = layout_of(split, *experts)
        checks = {
            kind.title: partial(
                distance,
                kind=(trained := TRAINED.get(kind.title, "aux_loss")),
                steps={c: [oracle.expected(name, trained, c, with_policy=True)] for c in CONTRACTS},
            )
            for kind in kinds
        }
        outcomes = launch.run_layout(folder, name, checks, together=_largest)
        by_kind |= {kind: float(outcomes[kind.title]) for kind in kinds}
    return [by_kind.get(kind) for kind in KINDS["megatron"]]


def main(folder: Path, rows: list[str]) -> None:
    save_plain_models(folder)
    save_models(folder)
    oracle = Oracle(folder)
    named = {split.name: split for split in splits("megatron")}
    distances = {}
    for row in rows:
        distances[row] = measure(folder, named[row], oracle)
        print(f"{row}: {distances[row]}", flush=True)
        (folder / "distances.json").write_text(json.dumps(distances))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
