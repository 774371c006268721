"""The tokenizer of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder in Hugging Face format, or of a name on its hub.

    Raises ``ValueError`` if it cannot be loaded.
    """
    from transformers import AutoTokenizer  # slow to import; the settings are checked before

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds: OSError, KeyError, the Rust library's own
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--hf-checkpoint {path}: cannot load a tokenizer from it ({type(error).__name__}: {reason}); give a "
            f"folder with tokenizer.json and tokenizer_config.json, or a name on the Hugging Face hub"
        ) from error
