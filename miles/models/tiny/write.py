"""Write a tiny random model, with a tokenizer, into a folder."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.models.reading import read_config
from miles.models.tiny.config import shrunk_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<end>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def write_like(source: str, folder: Path, seed: int = 1) -> None:
    """Write a tiny random model of the family of ``source``, with its tokenizer and generation config.

    Args:
        source: A Hugging Face folder, which needs no weights, or a name on the hub.
        folder: Where to write; created if missing.
        seed: Of the weights.

    Raises:
        OSError: There is no configuration or no tokenizer at ``source``.
        ValueError: The configuration, shrunk, is none that transformers builds a causal language model of.
    """
    from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source)
    write_model(shrunk_config(config), folder, seed)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # many models have none; that of the configuration is written already
        return
    generation.save_pretrained(folder)


def write_model(config: Mapping[str, Any], folder: Path, seed: int = 1) -> None:
    """Write a random model of exactly this configuration in fp32, without a tokenizer.

    Raises:
        ValueError: It is none that transformers builds a causal language model of.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(read_config(str(folder)), dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"transformers makes no tiny model of the family {config.get('model_type')} "
            f"({type(error).__name__}: {error})"
        ) from error
    model.save_pretrained(folder)


def character_tokenizer(characters: str = string.printable) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, by default the printable ones, and an end token of id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([END, *characters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
