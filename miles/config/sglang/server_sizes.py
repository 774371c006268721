"""Check how SGLang's flags divide the devices of an engine, as SGLang does when a server starts.

An engine is one tensor-parallel group of ``--rollout-num-gpus-per-engine`` devices. Its attention, its experts and its
dense layers may be divided otherwise among the same devices (``handle_context_parallelism``,
``handle_data_parallelism``, ``handle_dwdp`` and ``check_server_args`` in ``srt/arg_groups`` of SGLang 0.5.23).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles.base.flags import Errors, count
from miles.config.abilities import has_servers
from miles.config.model import readable_config
from miles.config.settings import Settings
from miles.config.sglang.server_flags import ATTENTION_DATA_PARALLEL, DATA_PARALLEL, SERVER, ServerFlags, has_flag
from miles.config.spelling import group_words

ATTENTION_DATA = ("--attn-dp-size", "--attention-data-parallel-size")
ATTENTION_CONTEXT = ("--attn-cp-size", "--attention-context-parallel-size")
EXPERT = ("--ep-size", "--expert-parallel-size", "--ep")
EXPERT_DATA = ("--moe-dp-size", "--moe-data-parallel-size")
DENSE = ("--moe-dense-tp-size",)
DISTRIBUTED_WEIGHTS = ("--dwdp-size",)
# With these SGLang decides by itself over how many devices the experts are divided.
_DECIDES_EXPERTS = ("--moe-a2a-backend", "--elastic-ep-backend", "--dwdp-size")


@dataclass(frozen=True)
class _Size:
    flag: str  # as the user has written it
    value: int  # 1 if the flag is not given

    @property
    def written(self) -> str:
        return f"{self.flag} {self.value}"


def check_server_sizes(flags: ServerFlags, engine_size: int, errors: Errors) -> None:
    """Check the sizes that divide the devices of an engine. Values that are no whole numbers are reported elsewhere.

    Args:
        flags: The words that are passed on.
        engine_size: Devices of one engine.
        errors: Collects what is wrong.
    """
    words = flags.server
    data, context = _attention_data(words, errors), _size(words, ATTENTION_CONTEXT)
    expert_data = _size(words, EXPERT_DATA)
    expert = _Size(EXPERT[0], 1) if has_flag(words, *_DECIDES_EXPERTS) else _size(words, EXPERT)
    for size in (data, context, expert, expert_data):
        _check_divides(size, engine_size, errors)
    if errors.none_about(*(_field(size) for size in (data, context, expert, expert_data))):
        _check_products(data, context, expert, expert_data, engine_size, errors)
    dense, weights = _size(words, DENSE), _size(words, DISTRIBUTED_WEIGHTS)
    for size, rule in ((dense, "SGLang divides dense layers"), (weights, "SGLang distributes weights")):
        if size.value not in (1, engine_size):
            what_to_do = f"give {engine_size}, or drop {size.flag}"
            errors.refuse(_field(size), size.value, f"{rule} over {_devices(engine_size)}, or not at all", what_to_do)


def check_server_heads(settings: Settings, errors: Errors) -> None:
    """Check that the devices that share one attention divide the model's heads. On CPU SGLang pads the heads."""
    if not has_servers(settings) or settings.sglang.rollout_external or not settings.generates:
        return
    words, engine_size = settings.server_flags.server, settings.sglang.rollout_num_gpus_per_engine
    config = readable_config(settings.model) or {}
    heads = (config.get("text_config") or config).get("num_attention_heads")
    groups = _attention_data(words, Errors()).value * _size(words, ATTENTION_CONTEXT).value
    if heads is None or engine_size < 1 or groups < 1 or engine_size % groups:
        return  # the model is not here, or the size has its own error
    shared = engine_size // groups
    if heads % shared:
        rule = f"SGLang divides the model's {heads} attention heads over {count(shared, 'device')}"
        what_to_do = f"give a size that divides {heads}"
        if groups > 1:
            rule, what_to_do = f"{rule} in each of {groups} groups", f"{what_to_do} times {groups}"
        errors.refuse("rollout_num_gpus_per_engine", engine_size, f"{rule}, which does not divide them", what_to_do)


def _attention_data(words: Sequence[str], errors: Errors) -> _Size:
    """Return over how many groups the requests of an engine are divided for attention."""
    attention, replicas = _size(words, ATTENTION_DATA), _size(words, DATA_PARALLEL)
    if not has_flag(words, ATTENTION_DATA_PARALLEL):
        return attention
    if attention.value == 1:
        return replicas
    if replicas.value > 1:
        rule = (
            f"contradicts {attention.written}, which says the same as this with --sglang{ATTENTION_DATA_PARALLEL[1:]}"
        )
        errors.refuse(_field(replicas), replicas.value, rule, f"drop {replicas.flag}")
    return attention


def _check_divides(size: _Size, engine_size: int, errors: Errors) -> None:
    if size.value < 1:
        errors.refuse(_field(size), size.value, "must be a whole number of at least 1", "give 1 or more")
    elif engine_size % size.value:
        rule = f"does not divide {_devices(engine_size)}"
        what_to_do = f"give a divisor of {engine_size}, or --rollout-num-gpus-per-engine {size.value} or a multiple"
        errors.refuse(_field(size), size.value, rule, what_to_do)


def _check_products(
    data: _Size, context: _Size, expert: _Size, expert_data: _Size, engine_size: int, errors: Errors
) -> None:
    groups = data.value * context.value
    if engine_size % groups:
        rule = f"with {data.written} makes {groups} groups, which do not divide {_devices(engine_size)}"
        errors.refuse(_field(context), context.value, rule, "give a smaller size")
    if expert_data.value == 1:
        return
    if context.value != expert_data.value:
        rule = f"must be 1 or equal to {SERVER}{ATTENTION_CONTEXT[0][2:]}, which is {context.value}"
        errors.refuse(_field(expert_data), expert_data.value, rule, f"give {context.value}")
    elif expert.value > 1 and expert.value * expert_data.value != engine_size:
        rule = f"times {expert.written} is not {engine_size}: together they divide {_devices(engine_size)}"
        errors.refuse(_field(expert_data), expert_data.value, rule, f"give {engine_size // expert.value}")


def _devices(engine_size: int) -> str:
    return f"the {count(engine_size, 'device')} of an engine (--rollout-num-gpus-per-engine)"


def _size(words: Sequence[str], names: Sequence[str]) -> _Size:
    """Return the last of the named flags with a whole number."""
    found = [(flag, values[0]) for flag, values in group_words(words) if flag in names and len(values) == 1]
    given = [_Size(SERVER + flag[2:], int(value)) for flag, value in found if re.fullmatch(r"-?\d{1,9}", value)]
    return given[-1] if given else _Size(SERVER + names[0][2:], 1)


def _field(size: _Size) -> str:
    return size.flag.removeprefix("--")
