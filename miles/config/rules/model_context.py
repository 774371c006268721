"""Check that a response fits into the model's context beside a prompt: engines refuse such requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from miles.base.flags import Errors, changed, flag_name
from miles.config.abilities import has_servers
from miles.config.components import train_backend_spec
from miles.config.host_share import PROMPT, text_config
from miles.config.settings import Settings
from miles.config.sglang.server_flags import SERVER, has_flag, value_of
from miles.models.packing import longest_generated, longest_trained

_CONTEXT = "--context-length"  # SGLang's flag
_UNKNOWN = sys.maxsize
_CUT = "--rollout-max-context-len"
# Flags of SGLang with which its limit is not that of the model's configuration, or no request is refused.
_OTHER_LIMITS = ("--json-model-override-args", "--allow-auto-truncate")
# What may ask for fewer tokens than --rollout-max-response-len.
_MAY_ASK_FOR_LESS = ("custom_generate_function_path", "rollout_function_path", "agent_command", "thinking_max_len")


def check_model_context(settings: Settings, errors: Errors) -> None:
    """Refuse a longest response that no prompt leaves room for, unless --rollout-max-context-len cuts it."""
    if not errors.none_about("hf_checkpoint", "sglang_context_length"):
        return
    with errors.catching():
        limit, name = _limit(settings)
        for field, length in _lengths(settings, limit):
            if length >= limit and errors.none_about(field):
                rule = f"leaves no room for a prompt in {name} {limit}"
                errors.refuse(field, length, rule, f"give {_CUT} {limit}, which ends responses there")


def notes_on_model_context(settings: Settings) -> Iterator[str]:
    """Say which prompts would end the run, if such prompts are not rare."""
    limit, name = _limit(settings)
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


def _limit(settings: Settings) -> tuple[int, str]:
    """Return the most tokens of a sequence, and what says so; a number without a bound if it is not known.

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
        given = value_of(words, _CONTEXT)
        if settings.sglang.rollout_external or has_flag(words, *_OTHER_LIMITS):
            return _UNKNOWN, ""
        if given is not None:
            return int(given) if given.isdecimal() else _UNKNOWN, SERVER + _CONTEXT[2:]
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
