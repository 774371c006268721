"""Tiny vision-language models of every family, and images for them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.llava_onevision.image_processing_llava_onevision import LlavaOnevisionImageProcessor
from transformers.models.llava_onevision.video_processing_llava_onevision import LlavaOnevisionVideoProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from examples.small_task import IMAGE_TEMPLATE, IMAGE_TOKENS, write_small_vision_model
from miles.engine.base import SamplingParams
from miles.models.images import expansions, load_processor
from miles.models.tiny import character_tokenizer
from miles.rollout.agents.chat import ChatFormat, ChatRequest, read_messages
from miles.rollout.agents.session import Session
from miles.rollout.trajectory import Trajectory
from miles.types.images import PromptImages
from miles.types.sample import Prompt, Sample

KINDS = ("qwen2_5_vl", "qwen3_vl", "llava_onevision")
_TEXT = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)


def write_vision_model(folder: Path, kind: str, seed: int = 1) -> str:
    """Write a random model of a family, with its processor, and return its folder."""
    if kind == "qwen2_5_vl":
        write_small_vision_model(folder, seed, hidden=32)
        return str(folder)
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS, "<image>", "<video>"]})
    ids = dict(zip(IMAGE_TOKENS, tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS)), strict=True))
    image, video = ids["<|image_pad|>"], ids["<|video_pad|>"]
    text = _TEXT | dict(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(seed)
    if kind == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 1e4}
        config = Qwen3VLConfig(
            text_config=text | dict(head_dim=32, rope_parameters=rope),
            vision_config=dict(hidden_size=32, intermediate_size=64, num_heads=2, depth=2, patch_size=4)
            | dict(initializer_range=0.2)  # else no token depends on where a patch is
            | dict(out_hidden_size=32, deepstack_visual_indexes=[0], num_position_embeddings=64),
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32)
        sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024 * 16}}
        processor = Qwen3VLProcessor(
            Qwen2VLImageProcessor(**sizes), tokenizer, Qwen3VLVideoProcessor(**sizes), chat_template=IMAGE_TEMPLATE
        )
    else:
        pinpoints = [[16, 16], [16, 32], [32, 16], [32, 32]]
        image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
        vision = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        config = LlavaOnevisionConfig(
            text_config=text | dict(model_type="qwen2"),
            vision_config=vision | dict(num_attention_heads=2, image_size=16, patch_size=4, vision_use_head=False),
            image_token_index=image,
            video_token_index=video,
            image_grid_pinpoints=pinpoints,
        )
        model = LlavaOnevisionForConditionalGeneration._from_config(config, dtype=torch.float32)
        side = {"height": 16, "width": 16}
        processor = LlavaOnevisionProcessor(
            LlavaOnevisionImageProcessor(size=side, image_grid_pinpoints=pinpoints),
            tokenizer,
            LlavaOnevisionVideoProcessor(size=side),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            chat_template=IMAGE_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
        )
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def image(seed: int, width: int = 16, height: int = 12) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(seed: int, width: int = 16, height: int = 12) -> bytes:
    """Return the file of an image of random pixels."""
    buffer = io.BytesIO()
    image(seed, width, height).save(buffer, "PNG")
    return buffer.getvalue()


def prompt_with(model: str, sizes: list[tuple[int, int]], seed: int) -> Prompt:
    """Return a prompt as rows are read; texts of all are alike, so that equal placeholders of two prompts are tried."""
    processor = load_processor(model)
    written = expansions(model, tuple(sizes)) if sizes else ()
    start, end = ("<|vision_start|>", "<|vision_end|>") if "<|image_pad|>" in "".join(written) else ("", "")
    text = "look: " + "and ".join(f"{start}{one}{end}" for one in written) + " what?"
    ids = tuple(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not sizes:
        return Prompt(text, ids)
    counts = tuple(one.count(processor.image_token) for one in written)
    files = tuple(png(seed + i, *size) for i, size in enumerate(sizes))
    indices = np.flatnonzero(np.array(ids) == processor.image_token_id)
    starts = tuple(indices[np.cumsum(counts) - counts].tolist())
    images = PromptImages(files, tuple(sizes), counts, starts, processor.image_token_id, model, f"rows:{seed}")
    return Prompt(text, ids, images=images)


async def play(
    model: str, engine: Any, number: int, sampling: SamplingParams, *, images: int = 2, side: int = 8, tokens: int = 24
) -> Sample:
    """Play three turns of a conversation that begins with images; after each, a tool returns one more."""
    tokenizer, limit = load_processor(model).tokenizer, sampling.max_new_tokens
    first = Sample(Prompt("", (1,)), number, number)
    trajectory = Trajectory(first, tokenizer, engine, sampling, lambda turn: 10 * number + turn, limit)
    session = Session(trajectory, ChatFormat(tokenizer), takes_stop_texts=True)
    parts = [{"type": "image", "image": png(100 * number + i, 2 * side, side)} for i in range(images)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    for turn in range(3):
        answer = await session.answer(ChatRequest(read_messages(messages), max_tokens=tokens))
        seen = {"type": "image", "image": png(100 * number + 50 + turn, side, 2 * side)}
        messages += [answer.message, {"role": "tool", "content": [{"type": "text", "text": "see"}, seen]}]
    (sample,) = session.samples("")
    sample.reward = 1.0
    return sample


def image_flags(folder: Path, side: int = 16, **model: int) -> list[str]:
    """Write a model and rows with one to three images each to ``folder``; return the flags of a run with them."""
    write_small_vision_model(folder / "model", 1, **(model or {"hidden": 32}))
    rows = []
    for number in range(12):
        files = [base64.b64encode(png(10 * number + i, side, side)).decode() for i in range(1 + number % 3)]
        rows.append({"input": "<image>" * len(files) + "what?", "label": "x", "images": files})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--hf-checkpoint",
        str(folder / "model"),
        "--prompt-data",
        str(folder / "rows.jsonl"),
        "--apply-chat-template",
    ]
    return [*words, "--multimodal-keys", '{"image": "images"}']
