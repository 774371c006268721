"""Check that a response fits into the model's context beside a prompt: engines refuse such requests."""

from __future__ import annotations

from typing import Any

from miles.arguments.launch.abilities import has_servers
from miles.arguments.model import local_config
from miles.arguments.settings import Settings
from miles.arguments.sglang.server_flags import SERVER, has_flag, value_of
from miles.flags import Errors, changed

CONTEXT = "--context-length"  # SGLang's flag
# Flags of SGLang with which its limit is not that of the model's configuration, or no request is refused.
OTHER_LIMITS = ("--json-model-override-args", "--allow-auto-truncate")
# What may ask for fewer tokens than --rollout-max-response-len.
OF_USER = ("custom_generate_function_path", "rollout_function_path", "agent_command", "thinking_max_len")


def check_model_context(settings: Settings, errors: Errors) -> None:
    """Refuse a longest response that no prompt leaves room for, unless --rollout-max-context-len cuts it."""
    rollout, evaluation = settings.rollout, settings.evaluation
    if not settings.generates or not errors.none_about("hf_checkpoint", "sglang_context_length"):
        return
    limit, name = None, ""
    with errors.catching():
        limit, name = _limit(settings)
    within = rollout.rollout_max_context_len
    if limit is None or (within is not None and within <= limit):
        return
    lengths = dict[str, int | None]()
    if not settings.is_given_samples and not changed(rollout, OF_USER):
        lengths["rollout_max_response_len"] = rollout.rollout_max_response_len
    if evaluation.has_sets and evaluation.eval_function_path is None:
        lengths["eval_max_response_len"] = evaluation.eval_max_response_len
    for field, length in lengths.items():
        if length is not None and length >= limit and errors.none_about(field):
            rule = f"leaves no room for a prompt in {name} {limit}"
            errors.refuse(field, length, rule, f"give --rollout-max-context-len {limit}, which ends responses there")


def _limit(settings: Settings) -> tuple[int | None, str]:
    """Return the most tokens of a sequence, and what says so; None if it is not known."""
    config = local_config(settings.model, "hf_checkpoint") or {}
    config = config.get("text_config") or config
    longest = config.get("max_position_embeddings")
    known = longest if isinstance(longest, int) else None
    if has_servers(settings):
        words = settings.server_flags.server
        given = value_of(words, CONTEXT)
        if settings.sglang.rollout_external or has_flag(words, *OTHER_LIMITS):
            return None, ""
        if given is not None:
            return int(given) if given.isdecimal() else None, SERVER + CONTEXT[2:]
        if _is_stretched(config):
            return None, ""
    return known, "the model's max_position_embeddings"


def _is_stretched(config: dict[str, Any]) -> bool:
    """Return whether the configuration scales positions: SGLang may then take more of them."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return not isinstance(scaling, dict) or "factor" in str(scaling)
