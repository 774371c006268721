"""The files of an exported model that make tokens of text and images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles.models.reading import WITH_IMAGES, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Add the tokenizer to an exported model, and the processor of a model that reads images."""
    tokenizer.save_pretrained(folder)
    if read_config(str(folder)).model_type in WITH_IMAGES:
        from miles.models.images import load_processor  # a text model reads none of it

        load_processor(tokenizer.name_or_path).save_pretrained(folder)
