"""A tiny model of each family trains a step, exports, goes to the torch engine and resumes, on one rank.

test_packing_check.py compares their log-probs and gradients with transformers, and
tests/fast/engine/embedded/test_layer_kinds.py the log-probs of the engine.
"""

from __future__ import annotations

import json

import torch
from cases import FIXED
from stage import PLAIN, Stage, make_backend, make_batch, shard_of, train, weights
from tiny_kinds import WINDOWS, config_of
from tolerance import log_prob_error
from transformers import AutoModelForCausalLM

from miles.engine.embedded.model_runner import ModelRunner

# The families of docs/models.md; of several with the same layers, one.
FAMILIES = (
    "deepseek_v3",
    "deepseek_v32",
    "gemma3_text",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2",
    "llama",
    "mistral",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)


def _save(stage: Stage, kind: str) -> str:
    """Save a model, and return the name of its folder."""
    known = "deepseek_v3" if kind == "kimi_k2" else kind
    config = config_of(known, initializer_range=0.15, **WINDOWS.get(kind, {}))
    torch.manual_seed(7)
    folder = stage.folder / f"family_{kind}"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": kind}))
    return folder.name


def each_family_trains_exports_syncs_and_resumes(stage: Stage) -> None:
    for kind in FAMILIES:
        name = _save(stage, kind)
        backend = make_backend(stage, name, lr=1e-2)
        shard = shard_of(stage, make_batch(PLAIN), FIXED)
        before = weights(backend)
        train(backend, [shard])
        trained = weights(backend)
        assert any(not torch.equal(before[name], now) for name, now in trained.items()), kind

        checkpoint, export = stage.folder / f"{name}_checkpoint", stage.folder / f"{name}_export"
        checkpoint.mkdir()
        backend.save(checkpoint, {})
        with torch.no_grad():
            for parameter in backend.policy.module.language_model.parameters():
                if parameter.requires_grad:  # a checkpoint has no others
                    parameter.to_local().zero_()
        backend.load(checkpoint)
        assert all(torch.equal(now, trained[name]) for name, now in weights(backend).items()), kind

        backend.export_hf(export)
        exported = AutoModelForCausalLM.from_pretrained(export)
        assert all(torch.equal(exported.state_dict()[name], now) for name, now in trained.items()), kind
        runner = ModelRunner(stage.model(name), torch.float32, "cpu")
        runner.load_weights(backend.export_weights())
        tokens = list(range(3, 12))
        with torch.no_grad():
            expected = exported(torch.tensor([tokens])).logits[0, -1]
        logits = runner.prefill([tokens], first_row=0)[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=log_prob_error(exported, [torch.tensor(tokens)]))


AFTER_TWO_RANKS = (each_family_trains_exports_syncs_and_resumes,)
