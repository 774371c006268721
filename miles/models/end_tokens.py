"""The tokens that end an answer, whatever part of a model's folder names them."""

import logging
from collections.abc import Iterable

from miles.base.text import InputError
from miles.base.tokenizer import end_of_turn, load_tokenizer
from miles.models.reading import read_config

_logger = logging.getLogger(__name__)


def end_token_ids(model: str) -> frozenset[int]:
    """Return the tokens that end an answer of the model in a folder, or of a name on the hub.

    A base model may name one in its configuration that its tokenizer does not end turns with, so they are all that any
    of ``config.json``, ``generation_config.json``, the tokenizer and its chat template name. It is logged if these are
    more than the configuration for generation has.
    """
    from transformers import GenerationConfig  # slow to import

    config = read_config(model)
    found = {"config.json": _ids(config.get_text_config().eos_token_id) | _ids(getattr(config, "eos_token_id", None))}
    try:
        found["generation_config.json"] = _ids(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:
        found["generation_config.json"] = set()
    for_generation = found["generation_config.json"] or found["config.json"]
    try:
        tokenizer = load_tokenizer(model)
    except InputError:  # an engine reads token ids
        tokenizer = None
    if tokenizer is not None:
        found["the tokenizer"] = _ids(tokenizer.eos_token_id)
        name = end_of_turn(tokenizer).strip()
        found["the chat template"] = _ids(tokenizer.convert_tokens_to_ids([name]) if name else None)
    all_ids = frozenset().union(*found.values())
    if tokenizer is not None and all_ids != for_generation:
        sources = {token: [source for source, ids in found.items() if token in ids] for token in sorted(all_ids)}
        shown = [
            f"{token} {tokenizer.convert_ids_to_tokens(token)!r} of {' and '.join(sources[token])}" for token in sources
        ]
        _logger.warning("note: --hf-checkpoint %s: answers end at any of the tokens %s", model, ", ".join(shown))
    return all_ids


def _ids(configured: int | Iterable[int] | None) -> set[int]:
    """Return the ids in a configuration's ``eos_token_id``, which holds one id, several, or none."""
    if configured is None:
        return set()
    return {configured} if isinstance(configured, int) else set(configured)
