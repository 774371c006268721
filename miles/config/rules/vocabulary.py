"""Check token ids against the model's vocabulary, and the tokens of the models that score its answers."""

from __future__ import annotations

from miles.base.flags import Errors
from miles.config.files.tokenizer_file import fault_of_tokens, ordinary_tokens
from miles.config.model import ModelArguments, local_vocab_size, vocab_size_of
from miles.config.settings import Settings


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


def check_tokens_of_scorers(settings: Settings, errors: Errors) -> None:
    """Refuse a reference or a teacher to which the token ids of ``--hf-checkpoint`` are other text, or no tokens.

    They score the ids that the policy chose. Folders with a ``config.json`` here are compared, and their tokenizers if
    both have one.
    """
    own = settings.model.hf_checkpoint
    if own is None or not errors.none_about("hf_checkpoint"):
        return
    for field in ("ref_load", "opd_teacher_load"):
        path = getattr(settings.model, field)
        if path is None or not errors.none_about(field):
            continue
        with errors.catching():
            fault = _fault_of_size(settings.model, field) or fault_of_tokens(path, own)
            if fault is not None:
                what_to_do = "it scores the ids that the policy chose, so give a model with the same tokenizer"
                errors.refuse(field, path, fault, what_to_do)


def _fault_of_size(model: ModelArguments, field: str) -> str | None:
    """Return that the model of ``field`` has fewer tokens than the policy can choose, as part of a sentence."""
    size, own_size = vocab_size_of(model, field), local_vocab_size(model)
    if size is None or (own_size is not None and own_size <= size):
        return None
    assert model.hf_checkpoint is not None, "the caller has looked"
    last = max((ordinary_tokens(model.hf_checkpoint) or {}).values(), default=0)
    if own_size is not None:
        last = min(last, own_size - 1)  # a tokenizer may have tokens that its model does not know
    if last < size:
        return None
    return f"has the token ids 0 to {size - 1}, and the tokenizer of --hf-checkpoint has ids up to {last}"
