"""Check a run that generates with SGLang's servers, and the flags that are passed on to them."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, assert_never

from miles.base.flags import LONGEST_VALUE, Errors, changed, count, fault_of_text, flag_name
from miles.base.text import one_line
from miles.config.model import readable_config
from miles.config.notes import NO_EFFECT, OTHER_PART, READ_AS, SAME, SPEED, Note, written
from miles.config.servers.flags import SglangArguments
from miles.config.servers.passed_on import (
    ADMIN_KEY,
    ROUTER,
    SERVER,
    SERVER_KEY,
    ServerFlags,
    has_flag,
    pairs,
    spelled,
    value_of,
)
from miles.config.servers.rules import QUANTIZED_AT_START, can_count_engines
from miles.config.settings import Settings
from miles.config.sglang.installed import (
    CONFIG,
    TABLE,
    Accepted,
    Reading,
    has_plugins,
    read_server_config,
    router_flags,
    server_flags,
)
from miles.config.spelling import Group, group_words
from miles.config.suggest import near_choice, nearest_flag
from miles.models.packing import reads_images

# Check that each flag is known to the installed SGLang, and is not set by the launcher itself.

_ADDRESS = "--ip"  # of a router that runs already, in related launchers
OWNED_BY_LAUNCHER: dict[str, str] = TABLE["owned_by_launcher"]
TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
# Switches of earlier versions, and the flag that has their effect.
REPLACED = {"--enable-ep-moe": "--ep-size", "--enable-deepep-moe": "--moe-a2a-backend"}
DATA_PARALLEL = ("--dp-size", "--dp", "--data-parallel-size")
# An engine here is one tensor-parallel group. Devices of other kinds of parallelism would not be counted,
# and new weights would not reach them.
OTHER_PARALLEL = {
    **dict.fromkeys(("--pp-size", "--pp", "--pipeline-parallel-size", "--nnodes"), "--rollout-num-gpus-per-engine"),
    **dict.fromkeys(DATA_PARALLEL, "--rollout-num-gpus"),
}
# SGLang checks no keys under these flags, and a run gives every server keys.
WITHOUT_KEYS = ("--tokenizer-worker-num", "--grpc-port", "--grpc-mode", "--smg-grpc-mode")
ATTENTION_DATA_PARALLEL = "--enable-dp-attention"  # SGLang's older way to say --attn-dp-size, within tensor parallel


def _check_flags(flags: ServerFlags, engine_size: int, errors: Errors) -> None:
    for prefix, words in ((SERVER, flags.server), (ROUTER, flags.router)):
        for flag, value in pairs(words):
            message = _fault_of_flag(prefix, flag, value, engine_size)
            if message is None and prefix == SERVER:
                message = _fault_of_server_flag(flag, value, engine_size, words)
            if message is None and flag in (SERVER_KEY, ADMIN_KEY) and not re.fullmatch(r"(?!-)[!-~]+", value):
                rule = 'a key must be one word of ASCII letters, digits and signs, and not begin with "-"'
                message = f"{spelled(prefix, flag)}: {rule}; give another one, or drop {spelled(prefix, flag)}"
            if message is not None:
                errors.add(message)


def _fault_of_flag(prefix: str, flag: str, value: str, engine_size: int) -> str | None:
    """Return the error of a flag that the launcher sets, or that the installed SGLang does not have."""
    written = spelled(prefix, flag)
    known = server_flags() if prefix == SERVER else router_flags()
    if flag in OWNED_BY_LAUNCHER:
        return f"{written}: {OWNED_BY_LAUNCHER[flag]}; drop {written}"
    if prefix == SERVER and flag in TENSOR_PARALLEL and value != str(engine_size):
        return (
            f"{written} {value}: contradicts --rollout-num-gpus-per-engine {engine_size}, which is the engine's "
            f"tensor-parallel size; give --rollout-num-gpus-per-engine {value}, and drop {written}"
        )
    if prefix == ROUTER and flag == _ADDRESS:
        rule = "a run starts its own router, and engines that run already are given by their own addresses"
        what_to_do = "give --rollout-external and --rollout-external-engine-addrs HOST:PORT …, and drop it"
        return f"{written}: {rule}; {what_to_do}"
    if not known or flag in known:
        return None
    near = nearest_flag(flag, known)
    what_to_do = f"did you mean {spelled(prefix, near)}?" if near else f"drop {written}"
    if prefix == SERVER and flag in REPLACED:
        what_to_do = f"give {spelled(prefix, REPLACED[flag])} instead"
    return f"{written}: the installed SGLang has no such flag; {what_to_do}"


def _fault_of_server_flag(flag: str, value: str, engine_size: int, words: Sequence[str]) -> str | None:
    """Return the error of devices that would not be counted, of a server without keys, or of a file of flags."""
    written = spelled(SERVER, flag)
    if flag in WITHOUT_KEYS and value != "1":
        return f"{written}: SGLang would answer everybody, since it checks no keys under this flag; drop {written}"
    if flag == CONFIG and value:
        _, fault = read_server_config(value)
        return f"{written} {one_line(value, LONGEST_VALUE)}: {fault or 'is given twice; give one file'}"
    within_attention = flag in DATA_PARALLEL and has_flag(words, ATTENTION_DATA_PARALLEL)
    is_number = re.fullmatch(r"-?\d+", value)  # another value is refused later
    if flag not in OTHER_PARALLEL or value == "1" or within_attention or not is_number:
        return None
    if flag in DATA_PARALLEL and value.isdecimal() and int(value):
        devices = int(value) * engine_size
        return (
            f"{written} {value}: SGLang updates no weights of replicas inside a server, so each is an engine here, and "
            f"{value} of them need {devices} devices or a multiple; give --rollout-num-gpus {devices}, as many to "
            f"--colocate, or add {spelled(SERVER, ATTENTION_DATA_PARALLEL)} for data parallelism inside one engine"
        )
    what_to_do = f"for more devices per engine give {OTHER_PARALLEL[flag]}, and drop {written}"
    return f"{written} {value}: an engine here is tensor parallel; {what_to_do}"


# Check how SGLang's flags divide the devices of an engine, as SGLang does when a server starts.
#
# An engine is one tensor-parallel group of ``--rollout-num-gpus-per-engine`` devices. Its attention, its experts and
# its dense layers may be divided otherwise among the same devices (``handle_context_parallelism``,
# ``handle_data_parallelism``, ``handle_dwdp`` and ``check_server_args`` in ``srt/arg_groups`` of SGLang 0.5.23).


ATTENTION_DATA = ("--attn-dp-size", "--attention-data-parallel-size")
ATTENTION_CONTEXT = ("--attn-cp-size", "--attention-context-parallel-size")
EXPERT = ("--ep-size", "--expert-parallel-size", "--ep")
EXPERT_DATA = ("--moe-dp-size", "--moe-data-parallel-size")
DENSE = ("--moe-dense-tp-size",)
DISTRIBUTED_WEIGHTS = ("--dwdp-size",)
# With these SGLang decides on its own over how many devices the experts are divided.
_DECIDES_EXPERTS = ("--moe-a2a-backend", "--elastic-ep-backend", "--dwdp-size")
PATCH = 14  # pixels


class _Size(NamedTuple):
    field: str  # the flag as the user has written it, without ``--``
    value: int  # 1 if the flag is not given

    @property
    def written(self) -> str:
        return f"--{self.field} {self.value}"


def check_server_sizes(flags: ServerFlags, engine_size: int, errors: Errors) -> None:
    """Check the sizes that divide the devices of an engine. Values that are no whole numbers are reported elsewhere.

    Args:
        flags: The words that are passed on.
        engine_size: Devices of one engine.
        errors: Collects the errors.
    """
    words = flags.server
    data, context = _attention_data(words, errors), _size(words, ATTENTION_CONTEXT)
    expert_data = _size(words, EXPERT_DATA)
    expert = _Size(_field(SERVER, EXPERT[0]), 1) if has_flag(words, *_DECIDES_EXPERTS) else _size(words, EXPERT)
    for size in (data, context, expert, expert_data):
        _check_divides(size, engine_size, errors)
    if errors.none_about(*(size.field for size in (data, context, expert, expert_data))):
        _check_products(data, context, expert, expert_data, engine_size, errors)
    dense, weights = _size(words, DENSE), _size(words, DISTRIBUTED_WEIGHTS)
    for size, rule in ((dense, "SGLang divides dense layers"), (weights, "SGLang distributes weights")):
        if size.value not in (1, engine_size):
            rule = f"{rule} over {_devices(engine_size)}, or not at all"
            errors.refuse(*size, rule, f"give {engine_size}, or drop --{size.field}")


def check_server_heads(settings: Settings, errors: Errors) -> None:
    """Check that the devices that share one attention divide the model's heads. On CPU SGLang pads the heads."""
    if SERVER not in settings.engine.prefixes or settings.sglang.rollout_external or not settings.generates:
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
        with_attention = f"this with {spelled(SERVER, ATTENTION_DATA_PARALLEL)}"
        rule = f"contradicts {attention.written}, which states the same as {with_attention}"
        errors.refuse(*replicas, rule, f"drop --{replicas.field}")
    return attention


def _check_divides(size: _Size, engine_size: int, errors: Errors) -> None:
    if size.value < 1:
        errors.refuse(*size, "must be a whole number of at least 1", "give 1 or more")
    elif engine_size % size.value:
        rule = f"does not divide {_devices(engine_size)}"
        what_to_do = f"give a divisor of {engine_size}, or --rollout-num-gpus-per-engine {size.value} or a multiple"
        errors.refuse(*size, rule, what_to_do)


def _check_products(
    data: _Size, context: _Size, expert: _Size, expert_data: _Size, engine_size: int, errors: Errors
) -> None:
    groups = data.value * context.value
    if engine_size % groups:
        rule = f"with {data.written} makes {groups} groups, which do not divide {_devices(engine_size)}"
        errors.refuse(*context, rule, "give a smaller size")
    if expert_data.value == 1:
        return
    if context.value != expert_data.value:
        rule = f"must be 1 or equal to {spelled(SERVER, ATTENTION_CONTEXT[0])}, which is {context.value}"
        errors.refuse(*expert_data, rule, f"give {context.value}")
    elif expert.value > 1 and expert.value * expert_data.value != engine_size:
        rule = f"times {expert.written} is not {engine_size}: together they divide {_devices(engine_size)}"
        errors.refuse(*expert_data, rule, f"give {engine_size // expert.value}")


def _devices(engine_size: int) -> str:
    return f"the {count(engine_size, 'device')} of an engine (--rollout-num-gpus-per-engine)"


def _size(words: Sequence[str], names: Sequence[str]) -> _Size:
    """Return the last of the named flags with a whole number."""
    numbers = [(flag, values[0]) for flag, values in group_words(words) if flag in names and len(values) == 1]
    sizes = [_Size(_field(SERVER, flag), int(value)) for flag, value in numbers if re.fullmatch(r"-?\d{1,9}", value)]
    return sizes[-1] if sizes else _Size(_field(SERVER, names[0]), 1)


NOT_QUANTIZED = f"SGLang {QUANTIZED_AT_START}"
NOT_ALONE = "a server would read prompts or generate, and each engine here does both"


def check_servers(settings: Settings, errors: Errors) -> None:
    """Check a run that generates with SGLang's servers."""
    sglang, passed_on = settings.sglang, settings.server_flags
    _check_flags(passed_on, sglang.rollout_num_gpus_per_engine, errors)
    _check_external(sglang, passed_on, errors)
    check_server_values(passed_on, errors)
    if not sglang.rollout_external and errors.none_about("rollout_num_gpus_per_engine"):
        check_server_sizes(passed_on, sglang.rollout_num_gpus_per_engine, errors)
    if settings.rollout.replays_support and not settings.reads_samples:
        _check_support(settings, errors)
    _check_stop_texts(settings, errors)
    _check_images(settings, errors)
    _check_kind_of_server(settings, errors)
    if can_count_engines(errors):
        num_servers = settings.num_engines + len(sglang.external_addresses)
        if num_servers < 2:
            for flag in passed_on.written([ROUTER]):
                errors.add(f"{flag}: would be ignored with one engine; give --rollout-num-gpus for two, or drop it")


def _check_images(settings: Settings, errors: Errors) -> None:
    """Refuse models whose images SGLang reads wrongly or not, and engines whose cache of images may not be off.

    SGLang's qwen2_5_vl.py reads 3 x 2 x 14 x 14 values as the pixels of a patch, and others as its embedding. Prompts,
    tools and environments may have images without ``--multimodal-keys``, so the model decides.
    """
    config = readable_config(settings.model) or {}
    if settings.data.multimodal_keys is None and not reads_images(config):
        return
    kind = config.get("model_type")
    size = config.get("vision_config", {}).get("patch_size", PATCH)
    rule = ""
    if kind == "qwen2_5_vl" and size != PATCH:
        rule = f"SGLang reads patches of {PATCH} pixels only, and the model's have {size}"
    elif kind == "llava_onevision":
        rule = f"SGLang has no model of the type {kind}"
    if rule:
        errors.refuse("rollout_engine", settings.rollout.rollout_engine, rule, "use --rollout-engine torch")
    if settings.sglang.rollout_external and settings.trains and not settings.training.freeze_vision_tower:
        rule = "the vision tower is trained, and running engines may reuse what earlier weights computed of an image"
        errors.refuse("rollout_external", True, rule, "give --freeze-vision-tower, or drop it")


def _check_kind_of_server(settings: Settings, errors: Errors) -> None:
    """Refuse servers that cannot take the trainer's weights, or cannot answer a request alone."""
    words = settings.server_flags.server
    quantization, mode = value_of(words, "--quantization"), value_of(words, "--disaggregation-mode")
    loads_again = value_of(words, "--load-format") == "flash_rl" or settings.rollout.debug_rollout_only
    if quantization not in (None, "None") and not loads_again:
        errors.refuse("sglang_quantization", quantization, NOT_QUANTIZED, "drop it")
    if mode not in (None, "null"):
        errors.refuse("sglang_disaggregation_mode", mode, NOT_ALONE, "drop it")


LARGEST_SUPPORT = "--sampling-mask-max-tokens"  # of SGLang's server, which 0.5.23 is the first to have
_SUPPORT_TOKENS = 4096  # its default


def _check_support(settings: Settings, errors: Errors) -> None:
    """Check that the servers say which tokens they draw from: SGLang does for a top-k up to a limit only."""
    rollout, known = settings.rollout, server_flags()
    names = changed(rollout, ["rollout_top_p", "rollout_top_k", "rollout_min_p"])
    otherwise = "use --rollout-engine torch, or add --no-support-replay (docs/off-policy.md)"
    if not settings.sglang.rollout_external and known and LARGEST_SUPPORT not in known:
        rule = "the installed SGLang does not say which tokens this keeps, so the trainer cannot repeat it"
        errors.refuse(names[0], getattr(rollout, names[0]), rule, f"install SGLang 0.5.23, {otherwise}")
        return
    maximum = value_of(settings.server_flags.server, LARGEST_SUPPORT)
    limit = int(maximum) if maximum is not None and maximum.isdecimal() else _SUPPORT_TOKENS
    if rollout.rollout_top_k == -1 or rollout.rollout_top_k > limit:
        name = "rollout_top_k"
        if rollout.rollout_top_k == -1:  # another flag truncates
            name = next((other for other in names if other != name), name)
        rule = (
            "SGLang reports which tokens it keeps, so that the trainer can repeat it, only under a --rollout-top-k "
            f"of at most {spelled(SERVER, LARGEST_SUPPORT)} {limit}"
        )
        what_to_do = f"give --rollout-top-k {min(limit, 1024)}, {otherwise}"
        errors.refuse(name, getattr(rollout, name), rule, what_to_do)


def _check_stop_texts(settings: Settings, errors: Errors) -> None:
    texts = settings.rollout.stop_texts
    ids = "give the ids of tokens with --rollout-stop-token-ids"
    if texts and settings.sglang.rollout_external:
        rule = "engines that are already running may have no tokenizer (--skip-tokenizer-init), and then see no text"
        errors.refuse("rollout_stop", texts, rule, f"{ids}, or drop --rollout-external")
    limits = settings.engine.stop_text_limits
    if limits is None:
        return
    if len(texts) > limits.number:
        errors.refuse("rollout_stop", texts, f"SGLang takes at most {limits.number} texts", f"give fewer, or {ids}")
    for text in texts:
        if (why := limits.why_not(text)) is not None:
            errors.refuse("rollout_stop", text, f"SGLang {why}", "give a part of the text that occurs nowhere else")


def _check_external(sglang: SglangArguments, passed_on: ServerFlags, errors: Errors) -> None:
    if not sglang.rollout_external:
        return
    if not sglang.external_addresses:
        what_to_do = "add HOST:PORT of each engine"
        errors.add(f"--rollout-external needs --rollout-external-engine-addrs: the engines; {what_to_do}")
    for address in sglang.external_addresses:
        host, _, port = address.removeprefix("http://").rpartition(":")
        if not host or not port.isdigit():
            rule, what_to_do = "is not HOST:PORT", "write it as 127.0.0.1:30000"
            errors.refuse("rollout_external_engine_addrs", address, rule, what_to_do)
    keys = [spelled(SERVER, flag) for flag in (SERVER_KEY, ADMIN_KEY)]  # those that they were started with
    for flag in passed_on.written([SERVER]):
        if flag not in keys:
            errors.add(
                f"{flag}: would be ignored with --rollout-external, whose engines are already running; give it to them "
                f"when they start, or drop {flag}"
            )


# Check the values of flags that are passed on to SGLang's server and router, as its parser would when it starts.

# Bounds of numbers: the smallest number that SGLang takes, whether it takes that number itself, and the largest.
_BOUNDS = {"share": (0.0, False, 1.0), "positive": (0.0, False, math.inf), "not_negative": (0.0, True, math.inf)}
_RANGES = {flag: _BOUNDS[kind] for kind, flags in TABLE["ranges"].items() for flag in flags}
# Flags whose text SGLang reads as JSON when a server starts, not when it reads its flags.
_JSON = ("--json-model-override-args",)
# Flags whose value is the path of a file, and those whose value is one if it ends so.
FILES = tuple(TABLE["files"])
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
    is_here = not settings.sglang.rollout_external and settings.cluster.ray_address is None
    if SERVER not in settings.engine.prefixes or not is_here:
        return
    for flag, values in group_words(settings.server_flags.server):
        field = _field(SERVER, flag)
        for path in values[:1]:
            is_file = flag in FILES or path.endswith(_FILES_OR_NAMES.get(flag, ()))
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
    return spelled(prefix, flag).removeprefix("--")


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


# Read the flags of SGLang's servers: earlier names, and flags that the run sets itself or does without.

RENAMED: dict[str, str] = TABLE["renamed"]
# Words that argparse, and so SGLang, reads as the beginning of a longer flag.
SHORTENED = {"--tp": "--tp-size", "--dp": "--dp-size", "--pp": "--pp-size"}
# Flags of the weight loader that starts from other engines over RDMA. The launcher sends all weights to every engine.
_REMOTE_LOADER = "--remote-instance-weight-loader-"
_DELTAS = "--update-weight-delta-"  # of an SGLang that is changed for related launchers
CHANGES_RESULTS = frozenset(TABLE["changes_results"])
OF_ADAPTERS = tuple(TABLE["of_adapters"])
OF_ADAPTERS_WHY = "engines receive the weights with the adapter added to them"


@dataclass
class _PassedOn:
    """The flags of SGLang and its router, which the steps below change or drop."""

    settings: Settings
    server: list[Group]
    router: list[Group]
    notes: list[Note] = field(default_factory=list)

    def drop(self, heading: str, group: Group, why: str, prefix: str = SERVER) -> None:
        (self.server if prefix == SERVER else self.router).remove(group)
        self.notes.append(Note(heading, _written(group, prefix), why))


def normalize_server_flags(settings: Settings) -> tuple[Settings, list[Note]]:
    """Rename flags and drop those that the launcher sets; drop all of them if no SGLang server generates."""
    passed_on = settings.server_flags
    flags = _PassedOn(settings, group_words(passed_on.server), group_words(passed_on.router))
    _drop_adapters(flags)
    if SERVER in settings.engine.prefixes:
        for step in (_read_config, _read_replicas, _rename, _drop_router):
            step(flags)
    else:
        _drop_all(flags)
    passed_on = replace(passed_on, server=_words(flags.server), router=_words(flags.router))
    return replace(flags.settings, server_flags=passed_on), flags.notes


def _drop_all(flags: _PassedOn) -> None:
    """Drop the flags, but for those that another engine would have to obey."""
    groups = [(group, SERVER) for group in flags.server if group[0] not in CHANGES_RESULTS]
    groups += [(group, ROUTER) for group in flags.router]
    for group, prefix in groups:
        flags.drop(OTHER_PART, group, "SGLang's, and another engine generates", prefix)


def _read_config(flags: _PassedOn) -> None:
    """Read SGLang's own file of flags as these flags; what cannot be read so stays, and is refused later."""
    files = [group for group in flags.server if group[0] == CONFIG]
    if len(files) != 1 or len(files[0][1]) != 1:
        return
    words, fault = read_server_config(files[0][1][0])
    if fault is None:
        groups = group_words(words)
        instead = " ".join(spelled(SERVER, flag) for flag, _ in groups)  # no values: one may be a key
        flags.drop(READ_AS, files[0], instead or "no flags")
        flags.server = [*groups, *flags.server]


def _drop_adapters(flags: _PassedOn) -> None:
    """Drop the flags of adapters, unless the servers are given adapters of their own."""
    if not any(flag == "--lora-paths" for flag, _ in flags.server):
        for group in [group for group in flags.server if group[0] in OF_ADAPTERS]:
            flags.drop(SAME, group, OF_ADAPTERS_WHY)


def _read_replicas(flags: _PassedOn) -> None:
    """Read the replicas that a server would hold as engines: each has its own server, behind the router.

    SGLang updates no weights of a server with replicas. What cannot be read so stays, and is refused later.
    """
    cluster, size = flags.settings.cluster, flags.settings.sglang.rollout_num_gpus_per_engine
    last = next((group for group in reversed(flags.server) if group[0] in DATA_PARALLEL), None)
    attention = any(flag == ATTENTION_DATA_PARALLEL for flag, _ in flags.server)
    if last is None or attention or flags.settings.sglang.rollout_external or len(last[1]) != 1:
        return
    replicas = int(last[1][0]) if last[1][0].isdecimal() else 0
    if replicas < 2 or size < 1:
        return
    if cluster.rollout_num_gpus is None and not cluster.colocate:
        cluster = replace(cluster, rollout_num_gpus=replicas * size)
    devices = cluster.world_size if cluster.colocate else cluster.rollout_num_gpus or 0
    if devices < 1 or devices % (replicas * size):
        return
    engines = f"{devices // size} engines of --rollout-num-gpus-per-engine {size} behind the router: a replica is one"
    flags.drop(READ_AS, last, engines)
    flags.server = [group for group in flags.server if group[0] not in DATA_PARALLEL]
    flags.settings = replace(flags.settings, cluster=cluster)


def _drop_router(flags: _PassedOn) -> None:
    """Drop the flags of a router that is not started. Unknown flags stay, and are refused later."""
    cluster, size = flags.settings.cluster, flags.settings.sglang.rollout_num_gpus_per_engine
    devices = cluster.world_size if cluster.colocate else cluster.rollout_num_gpus or size
    if size < 1 or flags.settings.sglang.rollout_external or devices // size > 1:
        return
    known = router_flags()
    for group in [group for group in flags.router if not known or group[0] in known]:
        flags.drop(NO_EFFECT, group, "one engine needs no router", ROUTER)


def _rename(flags: _PassedOn) -> None:
    """Replace earlier names, and drop what the launcher sets."""
    groups = flags.server
    present = {flag for flag, _ in groups}
    flags.server = []
    for group in groups:
        renamed, note = _renamed(group, flags.settings.sglang.rollout_num_gpus_per_engine, present)
        if renamed is not None:
            flags.server.append(renamed)
        if note is not None:
            flags.notes.append(note)


def _renamed(group: Group, engine_size: int, present: Collection[str]) -> tuple[Group | None, Note | None]:
    flag, values = group
    known = server_flags()
    if flag in REPLACED and flag not in known and (name := REPLACED[flag]) in known:
        if name in present:
            return None, Note(NO_EFFECT, _written(group, SERVER), f"{spelled(SERVER, name)} states it")
        value = str(engine_size) if name == "--ep-size" else "deepep"
        instead = name, (value,)
        return instead, Note(READ_AS, _written(group, SERVER), _written(instead, SERVER))
    if flag in TENSOR_PARALLEL and values != (str(engine_size),):
        why = f"an engine has the size of --rollout-num-gpus-per-engine {engine_size}"
        return None, Note(NO_EFFECT, _written(group, SERVER), why)
    if not known or flag in known:
        return group, None
    if SHORTENED.get(flag) in known:
        return (SHORTENED[flag], values), None
    if RENAMED.get(flag) in known:
        return (RENAMED[flag], values), Note(READ_AS, _written(group, SERVER), spelled(SERVER, RENAMED[flag]))
    if flag.startswith((_REMOTE_LOADER, _DELTAS)):
        return None, Note(SPEED, _written(group, SERVER), "every engine receives its weights from the trainer")
    return group, None


def _written(group: Group, prefix: str) -> str:
    flag, values = group
    return written(spelled(prefix, flag), values)


def _words(groups: list[Group]) -> tuple[str, ...]:
    return tuple(word for flag, values in groups for word in (flag, *values))
