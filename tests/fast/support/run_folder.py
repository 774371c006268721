"""Make run folders for tests of the report, with the production writers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from miles.observe.run_files import SAMPLES, RunFiles, RunHeader, SampleRecord, read

SETTINGS = {
    "loss": {"loss_aggregation": "sample_mean", "advantage_estimator": "grpo", "use_tis": False, "kl_coef": 0.0},
    "optimizer": {"lr": 1e-5},
    "tracking": {"output_dir": "x"},
}
DEFAULTS = {"loss": {"loss_aggregation": "sample_mean", "use_tis": False}, "optimizer": {"lr": 1e-6}}


def read_samples(folder: Path) -> dict[int, list[SampleRecord]]:
    """Return all stored answers by step."""
    by_step: dict[int, list[SampleRecord]] = {}
    for row in read(folder / SAMPLES, "rollout_id"):
        by_step.setdefault(row.pop("rollout_id"), []).append(SampleRecord(**row))
    return by_step


def write_header(folder: Path, settings: Mapping[str, Mapping[str, object]] = SETTINGS, total_steps: int = 40) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sections = {section: dict(fields) for section, fields in settings.items()}
    RunHeader("miles", sections, "averaged over tokens", "pg_loss = 1/N Σ", total_steps, DEFAULTS).save(folder)


def healthy_row(step: int, steps: int) -> dict[str, float]:
    """Return the metrics of a step of a run that learns as the quickstart does."""
    noise, done = random.Random(step), step / steps
    generate, train = 2.0 + noise.random(), 6.0 + noise.random()
    return {
        "train/loss": noise.gauss(0, 1e-3),
        "train/pg_loss": noise.gauss(0, 1e-3),
        "train/entropy_loss": 0.4 + 1.6 * math.exp(-3 * done),
        "train/pg_clipfrac": 0.0,
        "train/is_ratio": 1.0 + noise.gauss(0, 1e-3),
        "train/train_rollout_logprob_abs_diff": 0.01 + 0.005 * noise.random(),
        "train/grad_norm": 4 + 3 * noise.random(),
        "train/lr": 1e-5,
        "rollout/reward": 0.15 + 0.8 * done + noise.gauss(0, 0.02),
        "rollout/response_length": 11.0 - 6 * done,
        "rollout/truncated_fraction": max(0.0, 0.8 - done),
        "rollout/zero_std_groups": 0.5 * done,
        "perf/tokens_per_second": 40 + 5 * noise.random(),
        "perf/engine_busy": 0.25,
        "perf/engine_responses": 12.5,
        "perf/trainer_memory_gib": 3.1,
        "perf/rollout_memory_gib": 1.4,
        "time/generate": generate,
        "time/log_probs": 0.3 * train,
        "time/forward_backward": 0.5 * train,
        "time/optimizer": 0.1 * train,
        "time/train": train,
        "time/sync_weights": 0.3,
        "time/step": generate + train + 0.5,
    }


def write_rows(folder: Path, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    files = RunFiles(folder)
    for step, row in rows:
        files.append_metrics(step, row)


def sample(group: int, trajectory: int, **changes: object) -> SampleRecord:
    """Return an answer of four tokens, the third of them a tool's."""
    reward = float(trajectory % 2)
    values: dict[str, object] = {
        "prompt": f"<|im_start|>user\nWhat is {group} * 2?<|im_end|>\n<|im_start|>assistant\n",
        "response": f"It is {group * 2}.",
        "reward": reward,
        "label": str(group * 2),
        "status": "completed",
        "group": group,
        "trajectory": trajectory,
        "train_step": 1,
        "advantage": 2 * reward - 1,
        "denominator": 3.0,
        "trajectories": 4,
        "tokens": ["It", " is", "\n42\n", f" {group * 2}."],
        "mask": [[1, 2], [0, 1], [1, 1]],
        "rollout_log_probs": [-0.1, -1.5, 0.0, -3.0],
        "weight_versions": [[0, 2], [-1, 1], [0, 1]],
    }
    return SampleRecord(**(values | changes))  # type: ignore[arg-type]


def write_run(folder: Path, steps: int = 40, prompts: int = 2, samples: int = 2) -> Path:
    """Write a whole run: ``prompts`` groups of ``samples`` answers in each iteration."""
    write_header(folder, total_steps=steps)
    write_rows(folder, ((step, healthy_row(step, steps)) for step in range(1, steps + 1)))
    write_rows(folder, ((step, {"eval/heldout/accuracy": step / steps}) for step in range(5, steps + 1, 5)))
    files = RunFiles(folder)
    for step in range(1, steps + 1):
        count = prompts * samples
        records = [sample(i // samples, step * count + i, train_step=step, trajectories=count) for i in range(count)]
        files.append_samples(step, records)
    return folder
