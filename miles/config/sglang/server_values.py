"""Check the values of flags that are passed on to SGLang's server and router, as its parser would when it starts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from miles.base.flags import Errors, fault_of_text, flag_name
from miles.config.abilities import reads_sglang_flags
from miles.config.settings import Settings
from miles.config.sglang.config_file import CONFIG
from miles.config.sglang.flags import ROUTER, SERVER, ServerFlags
from miles.config.sglang.installed import Accepted, Reading, has_plugins, router_flags, server_flags
from miles.config.spelling import group_words
from miles.config.suggest import near_choice

# Bounds of numbers, as SGLang 0.5.23 checks them when a server starts (srt/arg_groups/*_hook.py): the smallest number
# that it takes, whether it takes that number itself, and the largest. Above 1, SGLang starts with a share of the GPU's
# memory that no GPU has.
_POSITIVE, _NOT_NEGATIVE = (0.0, False, math.inf), (0.0, True, math.inf)
_SHARE = (0.0, False, 1.0)
_RANGES: dict[str, tuple[float, bool, float]] = {
    **dict.fromkeys(("--mem-fraction-static", "--swa-full-tokens-ratio", "--hicache-host-memory-fraction"), _SHARE),
    **dict.fromkeys(
        (
            "--detokenizer-worker-num",
            "--gpu-id-step",
            "--grpc-response-timeout-secs",
            "--max-loras-per-batch",
            "--page-size",
            "--pp-max-micro-batch-size",
            "--sampling-mask-max-tokens",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        (
            "--lora-drain-wait-threshold",
            "--mamba-cache-philox-rounds",
            "--mm-io-worker-num",
            "--mm-processor-worker-num",
            "--prefill-decode-interval",
            "--prefill-decode-interval-min-bs",
            "--schedule-conservativeness",
            "--swa-prefix-tails",
        ),
        _NOT_NEGATIVE,
    ),
}
# Flags whose text SGLang reads as JSON when a server starts, not when it reads its flags.
_JSON = ("--json-model-override-args",)
# Flags whose value is the path of a file, and those whose value is one if it ends so.
FILES = (
    "--config",
    "--debug-tensor-dump-input-file",
    "--dllm-algorithm-config",
    "--flexkv-config-file",
    "--lmcache-config-file",
    "--pdmux-config-path",
    "--quantization-param-path",
    "--rl-quant-profile",
    "--ssl-ca-certs",
    "--ssl-certfile",
    "--ssl-keyfile",
)
_FILES_OR_NAMES = {"--chat-template": (".jinja", ".json"), "--completion-template": (".jinja", ".json")}

_SIZE = re.compile(r"\d+(\.\d+)?[kMGT]|\d+[KMGT]i")  # a number with a suffix: decimals only of powers of 1000


def check_server_values(flags: ServerFlags, errors: Errors) -> None:
    """Check how many values each flag has, and that SGLang can read them.

    Args:
        flags: The words that are passed on.
        errors: Collects the errors, and has the flags that are refused already.
    """
    _check_words(SERVER, flags.server, server_flags(), errors)
    _check_words(ROUTER, flags.router, router_flags(), errors)


def check_server_texts(flags: ServerFlags, errors: Errors) -> None:
    """Check that no value is empty or has characters that no message can hold; line breaks only in JSON and texts.

    The value of a flag that SGLang does not have is not shown: the flag may be a key whose name is misspelt.
    """
    for prefix, words, known in ((SERVER, flags.server, server_flags), (ROUTER, flags.router, router_flags)):
        for flag, values in group_words(words):
            field = _field(prefix, flag)
            for word in (flag, *values):
                rule = fault_of_text(word, has_lines=word != flag and flag not in FILES)
                if not word.strip():
                    errors.add(f"{flag_name(field)}: the value is empty; give one, or drop {flag_name(field)}")
                elif rule is not None:
                    # Reading the flags of an installed SGLang takes as long as the rest of the check.
                    errors.refuse(field, word if word != flag and flag in known() else None, rule, "correct the value")


def check_server_files(settings: Settings, errors: Errors) -> None:
    """Check that each file is there that a flag of the server names, unless the servers are on hosts of a cluster."""
    if not reads_sglang_flags(settings) or settings.sglang.rollout_external or settings.cluster.ray_address is not None:
        return
    for flag, values in group_words(settings.server_flags.server):
        field = _field(SERVER, flag)
        for path in values[:1]:
            is_file = (flag in FILES and flag != CONFIG) or (
                flag in _FILES_OR_NAMES and path.endswith(_FILES_OR_NAMES[flag])
            )
            if is_file and path != "None" and flag != CONFIG:
                errors.existing_file(field, path)


def _check_words(prefix: str, words: Sequence[str], known: Mapping[str, Accepted], errors: Errors) -> None:
    for flag, values in group_words(words):
        field, accepted = _field(prefix, flag), known.get(flag)
        if accepted is None or not errors.none_about(field):
            continue
        if prefix == SERVER and flag in _JSON:
            accepted = replace(accepted, reading="json")
        fault = _fault(accepted, values)
        if fault is None and prefix == SERVER:
            fault = _out_of_range(flag, accepted, values)
        if fault is not None:
            errors.refuse(field, values or None, *fault)


def _field(prefix: str, flag: str) -> str:
    """Return what ``Errors`` calls a flag that is passed on."""
    return (prefix + flag.removeprefix("--")).removeprefix("--")


def _fault(accepted: Accepted, values: Sequence[str]) -> tuple[str, str] | None:
    """Return the rule that the values of a flag break, and what to do; None if SGLang can read them."""
    if accepted.most == 0 and values:
        return "is a switch, which takes no value", "drop the value, or the flag if it is to be off"
    if len(values) < accepted.least:
        return "has no value", "add one"
    if accepted.most is not None and len(values) > accepted.most:
        return "takes one value", "give one; a value with spaces is written in quotes"
    for word in values:
        try:
            value = _read(word, accepted.reading)
        except ValueError:
            return _RULES[accepted.reading]
        if accepted.choices and value not in accepted.choices and not has_plugins():
            return _no_such_choice(word, accepted.choices)
    return None


def _out_of_range(flag: str, accepted: Accepted, values: Sequence[str]) -> tuple[str, str] | None:
    """Return why SGLang would stop at the number that a flag has; None if it would not."""
    if flag not in _RANGES or len(values) != 1:
        return None
    low, takes_low, high = _RANGES[flag]
    number = _read(values[0], accepted.reading)
    if low < number <= high or (takes_low and number == low):
        return None
    if high < math.inf:
        return f"must be in ({low:g}, {high:g}]", "give a share such as 0.8"
    return f"must be {'at least' if takes_low else 'above'} {low:g}", "give such a number"


def _read(word: str, reading: Reading) -> Any:
    """Return what SGLang reads.

    Raises:
        ValueError: SGLang cannot read it.
    """
    match reading:
        case "text":
            return word
        case "int":
            return int(word)
        case "float":
            return float(word)
        case "size":
            return word if _SIZE.fullmatch(word.strip()) else int(word)
        case "json":
            return json.loads(word)
        case unknown:
            assert_never(unknown)


_RULES: dict[Reading, tuple[str, str]] = {
    "int": ("SGLang reads a whole number", "give one, such as 4"),
    "float": ("SGLang reads a number", "give one, such as 0.5"),
    "size": ("SGLang reads a whole number, or a number with k, M, G, T, Ki, Mi, Gi or Ti", "give one, such as 16k"),
    "json": ("SGLang reads JSON", """write it in single quotes, such as '{"key": "value"}'"""),
}


def _no_such_choice(word: str, choices: Sequence[Any]) -> tuple[str, str]:
    names = [str(choice) for choice in choices if choice is not None]
    near = near_choice(word, names)
    return "no such choice", (f"did you mean {near}? SGLang has " if near else "give one of ") + ", ".join(names)
