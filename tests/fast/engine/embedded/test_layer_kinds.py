"""The embedded engine equals transformers on windows, sinks, recurrent layers and attention that chooses keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_answers import ROWS, answers, largest_difference
from safetensors.torch import load_file
from tiny_kinds import WINDOWS, config_of
from tolerance import KIND_LOG_PROB_ERROR
from transformers import AutoModelForCausalLM

from miles.engine.base import WeightChunk
from miles.engine.embedded import attention
from miles.engine.embedded.torch_engine import TorchEngine
from miles.models.packing import PACKABLE, RECURRENT


def save_model(kind: str, folder: Path, seed: int = 3) -> str:
    config = config_of(kind, initializer_range=0.2, **WINDOWS.get(kind, {}))
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", PACKABLE + RECURRENT)
async def test_log_probs_are_those_of_transformers(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "MASKED_QUERIES", 8)
    path = save_model(kind, tmp_path)
    generations = await answers(TorchEngine(path, torch.float32, "cpu", ROWS))
    assert largest_difference(path, generations) < KIND_LOG_PROB_ERROR


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next", "glm_moe_dsa"])
async def test_an_update_of_the_weights_leaves_nothing_of_the_old_ones(kind, tmp_path):
    first, other = (save_model(kind, tmp_path / str(seed), seed) for seed in (3, 4))
    engine = TorchEngine(first, torch.float32, "cpu", ROWS)
    before = await answers(engine)
    await engine.update_weights([WeightChunk(load_file(Path(other) / "model.safetensors"))], 1)
    after = await answers(engine)
    assert after[0][0].token_ids != before[0][0].token_ids
    assert largest_difference(other, after) < KIND_LOG_PROB_ERROR
