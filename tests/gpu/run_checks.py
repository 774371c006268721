"""Compare what runs of ``train.py`` have written: two that should be equal, and one that trained an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers.models.auto import AutoModelForCausalLM

from tests.fast.run.runs.launches import OF_TIME

SERVER_TITLES = ("sglang::scheduler", "sglang_on_cpu")
KILLED_ROLLOUTS = 6  # of two steps each


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run by step, without the metrics of time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {n: v for n, v in row.items() if not n.startswith(OF_TIME)} for row in rows}


def assert_equal_runs(first: Path, second: Path) -> None:
    """Fail unless metrics and exported weights (``hf/`` in each folder) are equal bit for bit."""
    rows, wanted = metrics(second), metrics(first)
    assert rows.keys() == wanted.keys() and wanted
    for step, row in wanted.items():
        differing = {
            n: (row.get(n), rows[step].get(n)) for n in row.keys() | rows[step] if row.get(n) != rows[step].get(n)
        }
        assert not differing, f"step {step}: {differing}"
    weights, others = (load_file(folder / "hf" / "model.safetensors") for folder in (first, second))
    assert weights.keys() == others.keys()
    unequal = [name for name in weights if not torch.equal(weights[name], others[name])]
    assert not unequal, f"weights differ in {', '.join(unequal)}"


def engine_against_trainer(folder: Path) -> float:
    """Return the largest mean difference of a step's log-probs between engine and trainer."""
    return max(abs(row["train/train_rollout_logprob_abs_diff"]) for row in metrics(folder).values())


def kill_server(run: Any) -> None:
    """Kill a server of a run with ``--use-fault-tolerance`` after its first steps, and wait for the run's end.

    Fails unless another server takes its place, and the run ends well with all of its steps.
    """
    run.wait_until(lambda: run.has_rows() and max(run.rows()) >= 2)
    next(process for process in run.left() if _is_server(process)).kill()
    assert run.wait() == 0, run.err
    assert sorted(run.rows()) == list(range(1, 2 * KILLED_ROLLOUTS + 1))
    assert (run.output / "engines" / "engine_0.log").read_text().count("server_args=") >= 2, "no other server started"
    assert run.none_left(), run.left()


def _is_server(process: psutil.Process) -> bool:
    try:
        return any(title in " ".join(process.cmdline()) for title in SERVER_TITLES)
    except psutil.NoSuchProcess:  # it ended meanwhile
        return False


def assert_adapter(base: Path, adapter: Path, export: Path, dtype: torch.dtype) -> None:
    """Fail unless peft reads the adapter, the export is its sum with the base, and nothing else has changed.

    Args:
        base: The model that was given as ``--hf-checkpoint``.
        adapter: The adapter's folder in a checkpoint or an export.
        export: The exported model.
        dtype: The run's; the sum is made in fp32 and rounded to it.
    """
    original = _weights(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    parts = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    assert parts and all(p.abs().max() > 0 for p in parts.values()), "the adapter has not learned"
    wanted = _weights(adapted.merge_and_unload())
    exported = _weights(AutoModelForCausalLM.from_pretrained(export, dtype="auto"))
    assert exported.keys() == wanted.keys() == original.keys()
    touched = {name for name in original if not torch.equal(original[name].to(dtype), exported[name])}
    assert touched and all("_proj" in name for name in touched), f"also changed: {sorted(touched)}"
    for name, weight in wanted.items():
        one_place = torch.finfo(dtype).eps * weight.abs().max().clamp_min(1e-30)
        assert (exported[name].float() - weight).abs().max() <= one_place, name


def _weights(model: Any) -> Mapping[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}
