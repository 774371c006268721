"""Write a random model and prompts for the measurements: ``python make_model.py FOLDER [--shape 4b] [--small]``.

``FOLDER/qwen3`` has the shape of Qwen3-0.6B, ``FOLDER/qwen3-4b`` the shape of Qwen3-4B; with ``--small`` both are
thousands of times smaller, to try the measurements without a GPU. The byte-level tokenizer is the tests' one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from tests.fast.conftest import byte_tokenizer

SHAPE: dict[str, Any] = dict(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)
SHAPES = {
    "0.6b": ("qwen3", SHAPE),
    "4b": (
        "qwen3-4b",
        SHAPE | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    ),
}
SMALL: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=16, head_dim=16
)


def write_model(folder: Path, shape: str = "0.6b", small: bool = False, device: str = "cpu") -> Path:
    """Write the model and the prompts; return the model's folder. Random numbers are faster on a GPU."""
    tokenizer = byte_tokenizer()
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    name, sizes = SHAPES[shape]
    config = Qwen3Config(**(sizes | SMALL if small else sizes), **ends, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    rows = [{"input": [{"role": "user", "content": f"{n} + {n} ="}], "label": str(2 * n)} for n in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cuda", "cpu"], help="where random numbers are drawn")
    options = parser.parse_args()
    write_model(options.folder, options.shape, options.small, options.device)


if __name__ == "__main__":
    main()
