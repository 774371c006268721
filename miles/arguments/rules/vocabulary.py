"""Check token ids against the model's vocabulary."""

from __future__ import annotations

from miles.arguments.model import local_vocab_size
from miles.arguments.settings import Settings
from miles.flags import Errors


def check_stop_token_ids(settings: Settings, errors: Errors) -> None:
    """Refuse ids that the model cannot generate, if its configuration is here and says how many it has."""
    ids = settings.rollout.stop_token_ids
    if not ids or not errors.none_about("hf_checkpoint", "rollout_stop_token_ids"):
        return
    with errors.catching():
        size = local_vocab_size(settings.model)
        if size is None:
            return
        beyond = tuple(token for token in ids if token >= size)
        if beyond:
            rule = f"the model has the token ids 0 to {size - 1}, by the vocab_size of its config.json"
            errors.refuse("rollout_stop_token_ids", beyond, rule, "give ids of its tokenizer's vocabulary")
