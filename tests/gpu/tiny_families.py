"""Random models of the families that SGLang serves: tiny, with heads of the sizes that its GPU kernels are made for.

A model has one layer of each kind that its family has. Everything but the sizes equals the published models, as far as
transformers' default configuration of the family does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from miles.models.reading import READ_AS
from miles.models.tiny import shrunk_config
from miles.training.fsdp.adapter import merged_weights
from miles.training.fsdp.checkpoint import as_on_disk
from miles.types.weights import WeightChunk, in_chunks
from tests.fast.conftest import byte_tokenizer

# The most important first: qwen3 and qwen3_moe are the most used. SGLang has not served the others in any other test.
FAMILIES = (
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_5_moe_text",
    "gpt_oss",
    "kimi_k2",
    "glm4_moe_lite",
    "qwen3_next",
    "nemotron_h",
    "glm_moe_dsa",
)
DENSE = "qwen3"

# Sizes that kernels are made for. ``shrunk_config`` makes them smaller, and here they stay.
_OF_KERNELS = (
    "head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "mamba_head_dim",
    "ssm_state_size",
    "index_head_dim",
    "index_n_heads",
)
_WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "q_lora_rank": 128,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_EXPERTS, _CHOSEN = 16, 4
_GROUPS = dict(n_group=4, topk_group=2)
_LATENT_HEADS = dict(num_attention_heads=16, num_key_value_heads=16)
# Published configurations have these too. SGLang reads them, transformers does not.
_INTERVAL = dict(full_attention_interval=2)
_SIGMOID = dict(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1)
# What differs from the default configuration. Published models of these families have heads of this size.
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=128),
    "qwen3_moe": dict(head_dim=128),
    "deepseek_v3": _LATENT_HEADS | _SIGMOID | _GROUPS,
    "glm4_moe": dict(head_dim=128),
    "qwen3_5_moe_text": _INTERVAL,
    "kimi_k2": _LATENT_HEADS | _SIGMOID | dict(n_group=1, topk_group=1),
    "glm4_moe_lite": _LATENT_HEADS | _SIGMOID | dict(first_k_dense_replace=1),
    "qwen3_next": _INTERVAL,
    "nemotron_h": dict(hybrid_override_pattern="ME*-"),
    "glm_moe_dsa": _SIGMOID | dict(num_attention_heads=64, num_key_value_heads=64),
}
_SPREAD = 0.08  # of the weights: logits then differ by about 1, and log-probs of other weights by as much
_VECTORS = 0.3  # of norms, biases and the like, around what they begin with


def family_config(kind: str) -> dict[str, Any]:
    """Return what ``config.json`` of the model states."""
    tokenizer, changes = byte_tokenizer(), _CHANGES.get(kind, {})
    published = AutoConfig.for_model(READ_AS.get(kind, kind)).to_dict()
    small = shrunk_config(published)
    small |= {name: published[name] for name in _OF_KERNELS if published.get(name)}
    small |= {name: size for name, size in _WIDTHS.items() if small.get(name)}
    small |= {name: _NUM_EXPERTS for name in _EXPERTS if small.get(name)}
    small |= {"num_experts_per_tok": _CHOSEN} if small.get("num_experts_per_tok") else {}
    if "hybrid_override_pattern" in changes:
        for name in ("layers_block_type", "layer_types", "mtp_layers_block_type", "num_hidden_layers"):
            small.pop(name, None)
        small["num_hidden_layers"] = len(changes["hybrid_override_pattern"])
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    small |= dict(vocab_size=len(tokenizer), initializer_range=_SPREAD, tie_word_embeddings=False, dtype="bfloat16")
    return small | ends | changes | {"model_type": kind}


def family_model(kind: str, seed: int) -> PreTrainedModel:
    """Return a random model in bf16. What models begin with at 0 or 1 (norms, biases) is random too.

    Otherwise an engine that loses these in an update would not show.
    """
    fields = family_config(kind) | {"model_type": READ_AS.get(kind, kind)}
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias") or (tensor.ndim == 1 and isinstance(tensor, torch.nn.Parameter)):
                tensor += _VECTORS * torch.randn_like(tensor)
    return model.to(torch.bfloat16).requires_grad_(False)


def write_family(kind: str, folder: Path, seed: int) -> PreTrainedModel:
    """Write a model with a tokenizer, as the publishers of the family do, and return it."""
    model = family_model(kind, seed)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    fields = family_config(kind)
    config = saved | {name: fields[name] for name in ("model_type", *_CHANGES.get(kind, {}))}
    if "hybrid_override_pattern" in config:
        config = {name: value for name, value in config.items() if name not in ("layers_block_type", "layer_types")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return model


def write_readable(folder: Path) -> Callable[[list[int]], str]:
    """Write a dense model whose greedy responses are printable ASCII, and return what makes text of them.

    The head of every other token is 0, and some logit is larger. Parts of UTF-8 would read otherwise alongside others.
    """
    tokenizer, model = byte_tokenizer(), family_model(DENSE, seed=0)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token])
        if token in tokenizer.all_special_ids or not (text.isascii() and text.isprintable()):
            model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return lambda tokens: str(tokenizer.decode(tokens))


def sent_weights(model: PreTrainedModel) -> Iterator[WeightChunk]:
    """Yield the weights in chunks as an FSDP trainer sends them to servers."""
    return in_chunks(as_on_disk(model, merged_weights(model, torch.bfloat16)), bucket_bytes=4 * 1024**2)


def served_architectures() -> frozenset[str]:
    """Return the classes of models in the files of the installed SGLang; empty if there is none.

    The files are read, not imported: a class that cannot be imported here is a failure, not a reason to skip.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    entries = [
        entry
        for file in models.rglob("*.py")
        for entry in re.findall(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    return frozenset(name for entry in entries for name in re.findall(r"\w+", entry))
