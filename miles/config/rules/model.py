"""Check that a response fits into the model's context alongside a prompt: engines refuse such requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from miles.base.flags import Errors, changed, flag_name
from miles.config.abilities import has_servers
from miles.config.components import ENGINES, engine_spec, names_with, train_backend_spec
from miles.config.files import fault_of_tokens, ordinary_tokens
from miles.config.host_share import PROMPT, text_config
from miles.config.model import ModelArguments, local_config, local_vocab_size, vocab_size_of
from miles.config.settings import Settings
from miles.config.sglang.flags import SERVER, VLLM, has_flag, value_of
from miles.models.packing import longest_generated, longest_trained, reads_images
from miles.models.reading import WITH_IMAGES

_CONTEXT = "--context-length"  # SGLang's flag
_MODEL_LEN = "--max-model-len"  # vLLM's
_UNKNOWN = sys.maxsize
_CUT = "--rollout-max-context-len"
# Flags of SGLang that change its limit from the one in the model's configuration, or make it refuse no request.
_OTHER_LIMITS = ("--json-model-override-args", "--allow-auto-truncate")
# What may ask for fewer tokens than --rollout-max-response-len.
_MAY_ASK_FOR_LESS = ("custom_generate_function_path", "rollout_function_path", "agent_command", "thinking_max_len")


def check_model_context(settings: Settings, errors: Errors) -> None:
    """Refuse a longest response that no prompt leaves room for, unless --rollout-max-context-len cuts it."""
    if not errors.none_about("hf_checkpoint", "sglang_context_length"):
        return
    with errors.catching():
        limit, name = sequence_limit(settings)
        for field, length in _lengths(settings, limit):
            if length >= limit and errors.none_about(field):
                rule = f"leaves no room for a prompt in {name} {limit}"
                errors.refuse(field, length, rule, f"give {_CUT} {limit}, which ends responses there")


def notes_on_model_context(settings: Settings) -> Iterator[str]:
    """Say which prompts would end the run, if such prompts are not rare."""
    limit, name = sequence_limit(settings)
    prompt = settings.data.rollout_max_prompt_len or min(PROMPT, limit // 4)
    for field, length in _lengths(settings, limit):
        if prompt + length > limit:
            yield (
                f"{flag_name(field)} {length}: a prompt of more than {limit - length} tokens would end the run, since "
                f"the response does not fit into {name} {limit}; {_CUT} {limit} ends responses there"
            )


def _lengths(settings: Settings, limit: int) -> Iterator[tuple[str, int]]:
    """Yield the longest responses that engines are asked for, if nothing cuts them to ``limit``."""
    rollout, evaluation = settings.rollout, settings.evaluation
    within = rollout.rollout_max_context_len
    if not settings.generates or (within is not None and within <= limit):
        return
    longest = rollout.rollout_max_response_len
    asks = not settings.is_given_samples and not changed(rollout, _MAY_ASK_FOR_LESS)
    if asks and longest is not None:
        yield "rollout_max_response_len", longest
    own = evaluation.eval_max_response_len
    of_evaluation = longest if own is None else own
    if not evaluation.has_sets or evaluation.eval_function_path is not None or of_evaluation is None:
        return
    if not (asks and of_evaluation == longest):  # to yield it once is enough
        yield "rollout_max_response_len" if of_evaluation == longest else "eval_max_response_len", of_evaluation


def sequence_limit(settings: Settings) -> tuple[int, str]:
    """Return the most tokens of a sequence, and the setting that limits them; an unlimited number if it is not known.

    Raises:
        FlagError: The configuration of the model cannot be read.
    """
    config = text_config(settings) or {}
    generated = _limit_of_engine(settings, config)
    backend = train_backend_spec(settings.training.train_backend)
    trained = longest_trained(config) if settings.trains and backend.long_samples_change_others else None
    if trained is None or generated[0] <= trained[0]:
        return generated
    return trained[0], f"the model's {trained[1]}"


def _limit_of_engine(settings: Settings, config: dict[str, Any]) -> tuple[int, str]:
    if has_servers(settings):
        words = settings.server_flags.server
        flag, given = SERVER + _CONTEXT[2:], value_of(words, _CONTEXT)
        if given is None and (given := value_of(settings.server_flags.vllm, _MODEL_LEN)) is not None:
            flag = VLLM + _MODEL_LEN[2:]
        if settings.sglang.rollout_external or has_flag(words, *_OTHER_LIMITS):
            return _UNKNOWN, ""
        if given is not None:
            return int(given) if given.isdecimal() else _UNKNOWN, flag
        if _is_stretched(config):
            return _UNKNOWN, ""
        longest, name = config.get("max_position_embeddings"), "max_position_embeddings"
    else:
        longest, name = longest_generated(config)
    return longest if isinstance(longest, int) else _UNKNOWN, f"the model's {name}"


def _is_stretched(config: dict[str, Any]) -> bool:
    """Return whether the configuration scales positions: SGLang may then take more of them."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        return True
    parts = (scaling, *(part for part in scaling.values() if isinstance(part, dict)))  # models may have one per kind
    return any("factor" in part for part in parts)


# Check token ids against the model's vocabulary, and the tokens of the models that score its answers.


def check_images(settings: Settings, errors: Errors) -> None:
    """Refuse images for a model or an engine that reads none, and for a backend that trains none."""
    data, config = settings.data, None
    if errors.none_about("hf_checkpoint"):
        with errors.catching():
            config = local_config(settings.model, "hf_checkpoint")
    backend = settings.training.train_backend
    if settings.trains and data.multimodal_keys is not None and not train_backend_spec(backend).trains_images:
        rule = f"--train-backend {backend} trains no images: it would need vision towers and 3-D rotary positions"
        errors.refuse("multimodal_keys", data.multimodal_keys, rule, "give --train-backend fsdp")
    elif data.multimodal_keys is not None and config is not None and not reads_images(config):
        what_to_do = f"give a model of the type {', '.join(WITH_IMAGES)}, or train on the text columns"
        rule = f"a {config.get('model_type')} reads no images here"
        errors.refuse("multimodal_keys", data.multimodal_keys, rule, what_to_do)
    engine = settings.rollout.rollout_engine
    if settings.generates and data.multimodal_keys is not None and not engine_spec(engine).reads_images:
        what_to_do = f"give --rollout-engine {names_with(ENGINES, 'reads_images')}"
        errors.refuse("multimodal_keys", data.multimodal_keys, f"--rollout-engine {engine} reads no images", what_to_do)


def check_stop_token_ids(settings: Settings, errors: Errors) -> None:
    """Refuse ids that the model cannot generate, if its configuration is here and states how many it has."""
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


# Check that rewards which compare with a reference answer are given one.


OWN_LABELS = ("reasoning_gym:", "verifiers:")  # of sources whose rows have their labels in fixed columns
# Code of the user that may give samples labels or rewards.
OF_USER = ("custom_generate_function_path", "rollout_function_path", "agent_command", "environment")


def check_labels(settings: Settings, errors: Errors) -> None:
    """Refuse a reward that needs the label of each row, if no flag names the labels' column: it could score nothing."""
    reward, data = settings.reward, settings.data
    scores_rows = settings.generates and not settings.is_given_samples and not changed(settings.rollout, OF_USER)
    if not scores_rows or reward.on_error in ("value", "drop") or data.label_key is not None:
        return
    if data.prompt_data is None or data.prompt_data.startswith(OWN_LABELS):
        return
    if needing := reward.needing_labels:
        rule = f"{', '.join(needing)} compares answers with a reference answer, and no flag states which column has it"
        errors.refuse("rm_type", reward.rm_type, rule, "add --label-key COLUMN")
