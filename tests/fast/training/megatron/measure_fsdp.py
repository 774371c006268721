"""Measure distances from the oracle for rows of layout_grid.py on FSDP: ``python measure_fsdp.py FOLDER ROW...``.

FOLDER/distances.json has one number per column.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import BATCHES, FIXED, FULL, PADDED, VOCABULARY, Case, Layout, context, dynamic, loss_of
from compare import distance, off_policy, samples_of, wanted
from layout_grid import DYNAMIC_BUDGET, Split, splits
from ranks import started_ranks
from tiny_llama import SHAPE
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from miles.config.training import TrainingArguments

EXPERTS = Qwen3MoeConfig(
    **(SHAPE | {"vocab_size": VOCABULARY}),
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    initializer_range=0.15,
)
MODELS = ("untied", "qwen3_moe")


def cases_of(split: Split, model: str, oracle: Any) -> list[Case]:
    layout = Layout(split.name, split.ranks, PADDED if split.padded else context(split.cp), FIXED)
    if not split.cp:
        layout = replace(layout, parallel=dynamic(DYNAMIC_BUDGET), training=TrainingArguments())
    plain = Case(BATCHES["compacted"], loss_of("token_mean"), layout, seed=5, model=model)
    full = Case(BATCHES["masked"], loss_of("sample_mean", **FULL), layout, seed=5, model=model)
    return [plain, off_policy(full, oracle)]


def main(folder: Path, rows: list[str]) -> None:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(EXPERTS).save_pretrained(folder / "qwen3_moe")
    named = {split.name: split for split in splits("fsdp")}
    distances: dict[str, list[float]] = {row: [] for row in rows}
    with started_ranks(folder) as ranks:
        for model in MODELS:
            # transformers' fused experts do not compute in float64
            oracle = AutoModelForCausalLM.from_pretrained(
                folder / model, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
            ).train()
            for row in rows:
                worst = 0.0
                for case in cases_of(named[row], model, oracle):
                    (result,) = ranks.run(case)
                    error, lines = distance(result, *wanted(case, oracle, samples_of(case)))
                    print(*lines, sep="\n", end="\n" if lines else "", flush=True)
                    worst = max(worst, error)
                distances[row].append(worst)
                print(f"{row}, {model}: {worst:.1e}", flush=True)
    (folder / "distances.json").write_text(json.dumps(distances))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
