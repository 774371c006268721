"""A rehearsal that runs a few of a row of equal layers gives what one that runs all of them gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rehearsed_layouts import DENSE, EXPERTS, LAYOUTS, save_model
from tiny_kinds import config_of
from transformers import LlamaConfig, Qwen3MoeConfig

from miles.commands.rehearsal import trace as equal_layers
from miles.commands.rehearsal.meter import OperationCounts, Phase, Record, Work
from miles.commands.rehearsal.trace import RankTrace, trace_rank
from miles.config.validate import validate

LAYERS = 9
CHOSEN = {  # layouts, and the copies of layers: in how many passes, and of how many layers in each
    "fsdp, 2 ranks": [4] * 2,
    "fsdp, 2 ranks, recomputed": [4] * 2,
    "fsdp, 2 ranks, reference": [4] * 3,
    "megatron, 1 rank": [4] * 4,
    "megatron, DP 2, sharded optimizer": [4] * 4,
    "megatron, experts": [4] * 4,
    "megatron, PP 2": [4] * 4,
    "megatron, EP 2": [4] * 4,
    "megatron, TP 2, sequence": [4] * 4,
    "megatron, CP 2": [4] * 4,
    "megatron, TP 2, CP 2": [4] * 4,
    "megatron, EP 2, TP 2": [4] * 4,
    "megatron, EP 2, latent": [4] * 4,
    "megatron, adapter": [4] * 4,
    "fsdp, 2 ranks, adapter": [4] * 2,
    "fsdp, CP 2": [4] * 2,
}
LATENT = replace(LAYOUTS["megatron, EP 2"], model="latent")
FAST = "fsdp, 2 ranks"  # test_known_operations.py traces Megatron


@pytest.fixture(params=[pytest.param(name, marks=[] if name == FAST else [pytest.mark.slow]) for name in CHOSEN])
def name(request: pytest.FixtureRequest) -> str:
    """A layout."""
    chosen: str = request.param
    return chosen


def test_copies_of_layers_are_what_the_layers_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS.get(name, LATENT)
    layers = LAYERS * layout.sizes.get("pipeline_model_parallel_size", 1)
    save_model(tmp_path / "dense", LlamaConfig(**DENSE | dict(num_hidden_layers=layers)), weights=False)
    save_model(tmp_path / "experts", Qwen3MoeConfig(**EXPERTS | dict(num_hidden_layers=layers)), weights=False)
    latent = config_of("deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=0)
    save_model(tmp_path / "latent", latent, weights=False)
    settings = validate(layout.settings(tmp_path)).settings
    copies = _watch(monkeypatch)
    whole = trace_rank(settings, layout.ranks - 1, every_layer=True)
    assert not copies
    assert _comparable(trace_rank(settings, layout.ranks - 1)) == _comparable(whole)
    assert copies == CHOSEN[name]


def test_layers_that_do_not_do_the_same_all_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS["fsdp, 2 ranks"]
    save_model(tmp_path / "dense", LlamaConfig(**DENSE | dict(num_hidden_layers=LAYERS)), weights=False)
    settings = validate(layout.settings(tmp_path)).settings
    trace = trace_rank(settings, 0)
    monkeypatch.setattr(Record, "is_equal", lambda *_: False)
    copies = _watch(monkeypatch)
    assert _comparable(trace_rank(settings, 0)) == _comparable(trace)
    assert len(copies) <= 1


def test_layers_of_another_structure_are_in_a_row_of_their_own() -> None:
    def layer(place: int, window: int, width: int = 4) -> torch.nn.Module:
        made = torch.nn.Linear(4, width)
        made.layer_idx, made.window = place, window
        return made

    layers = [layer(0, 8), layer(1, 8), layer(2, 16), layer(3, 16), layer(4, 16, width=5), layer(5, 8)]
    assert list(equal_layers.rows(layers)) == [[0, 1], [2, 3], [4], [5]]


def _comparable(trace: RankTrace) -> RankTrace:
    """Return the trace with the sums of the optimizer's work, which is one operation on all weights or two on parts."""
    optimizer = trace.tallies[Phase.OPTIMIZE]
    work = Counter({Work(optimizer.flops, optimizer.bytes, 0): 1})
    return replace(trace, tallies={**trace.tallies, Phase.OPTIMIZE: OperationCounts(work, optimizer.messages)})


def _watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of how often each stretch will have been copied."""
    copies: list[int] = []
    copy = Record.copy

    def watched(record: Record, stretch: equal_layers.Stretch, times: int) -> None:
        copies.append(times)
        copy(record, stretch, times)

    monkeypatch.setattr(Record, "copy", watched)
    return copies
