"""A small task for an example: a random model whose tokens are characters, demonstrations and prompts in JSON lines."""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.models.tiny import character_tokenizer, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line; make the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def made_up_names(rng: random.Random) -> Iterator[str]:
    """Yield different names of 3 or 4 letters endlessly."""
    seen = set()
    while True:
        name = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 4)))
        if name not in seen:
            seen.add(name)
            yield name


def write_small_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden: int, intermediate: int, layers: int
) -> None:
    """Write a random Qwen3 with four heads for contexts of 128 tokens, and its tokenizer.

    Args:
        folder: Where to write; created if missing.
        tokenizer: Has ``character_tokenizer``'s end token, of id 0.
        seed: Of the weights.
        hidden: The hidden size, a multiple of four.
        intermediate: The size inside an MLP.
        layers: The number of layers.
    """
    heads = 4
    config = dict(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    write_model(config, folder, seed)
    tokenizer.save_pretrained(folder)


IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def write_small_vision_model(
    folder: Path,
    seed: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    patch: int = 4,
    characters: str = string.printable,
    deviation: float = 0.02,
) -> None:
    """Write a random Qwen2.5-VL whose tokens are characters, with its processor.

    Args:
        folder: Where to write; created if missing.
        seed: Of the weights.
        hidden: The width of the language part and of the tower, a multiple of 32.
        layers: The number of layers of each.
        patch: The width and height of a patch in pixels; two by two patches are a token.
        characters: The characters that have a token.
        deviation: The standard deviation of the weights. So small a model learns sooner from larger ones.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    tokenizer = character_tokenizer(characters)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    ids: Any = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    start, image, end, video = ids
    heads = max(1, hidden // 32)
    common = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "initializer_range": deviation}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
    config = Qwen2_5_VLConfig(
        text_config=common
        | {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers}
        | {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "rope_parameters": rope}
        | {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0},
        vision_config=common
        | {"num_heads": heads, "depth": layers, "out_hidden_size": hidden, "patch_size": patch}
        | {"fullatt_block_indexes": [layers - 1], "window_size": 4 * patch},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    sizes = {"patch_size": patch, "merge_size": 2}
    bounds = {"size": {"shortest_edge": 4 * patch * patch, "longest_edge": 1024 * patch * patch}}
    images, videos = Qwen2VLImageProcessor(**sizes, **bounds), Qwen2VLVideoProcessor(**sizes, **bounds)
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=IMAGE_TEMPLATE).save_pretrained(folder)


def run_writer(
    description: str | None, write_tasks: Callable[[Path, int], None], write_random_model: Callable[[Path, int], None]
) -> None:
    """Be the command ``… FOLDER [--seed N]``: write the task's rows to FOLDER, and its model to FOLDER/model.

    Args:
        description: The description for ``--help``.
        write_tasks: Writes the rows to a folder with a seed.
        write_random_model: Writes the model to a folder with a seed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_tasks(options.folder, options.seed)
    write_random_model(options.folder / "model", options.seed)
