"""Write files of sweeps, and folders of finished runs, with the production writers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from run_folder import write_rows

from miles.commands.sweeps.definition import Definition, PlannedRun, plan, read_definition
from miles.commands.sweeps.swept_run import SweptRun
from miles.observe.run_files import RunHeader

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "hf_checkpoint": "some/model",
    "prompt_data": "reasoning_gym:products",
    "rm_type": "last_number",
    "num_rollout": "10",
    "rollout_batch_size": "8",
    "n_samples_per_prompt": "4",
    "rollout_max_response_len": "64",
}


def write_sweep(folder: Path, flags: Mapping[str, Any] | None = None, **keys: Any) -> Path:
    """Write a sweep as YAML, which JSON is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.yaml"
    path.write_text(json.dumps({"flags": FLAGS | dict(flags or {})} | keys))
    return path


def planned(folder: Path, flags: Mapping[str, Any] | None = None, **keys: Any) -> tuple[Definition, list[PlannedRun]]:
    definition = read_definition(write_sweep(folder, flags, **keys))
    return definition, plan(definition, folder / "out")


Metrics = Callable[[str, int, int], Mapping[str, float]]  # of a variant, a seed and a step


def write_run_of(run: PlannedRun, metrics: Metrics = lambda *run: {"rollout/reward": 0.5}, steps: int = 10) -> SweptRun:
    """Write the folder of a run that has done ``steps`` of its 10 steps."""
    swept = SweptRun(run)
    swept.begin()
    RunHeader.from_sections("miles", run.settings, "words", "formula", 10).save(run.folder)
    write_rows(run.folder, ((step, metrics(run.variant, run.seed, step)) for step in range(1, steps + 1)))
    return swept
