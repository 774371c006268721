"""Check a run that generates with vLLM's servers. vLLM's own parser judges ``--vllm-*`` in vLLM's environment.

vLLM wants other versions of packages than a run has, so it is in a separate environment (scripts/vllm.sh).
Importing its parser takes seconds: that is done once per command, and only if it has such flags.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from miles.base.flags import Errors, changed
from miles.config.host_share import is_on_cpu
from miles.config.model import readable_config
from miles.config.servers.passed_on import VLLM, spelled, value_of
from miles.config.servers.rules import QUANTIZED_AT_START
from miles.config.settings import Settings
from miles.config.spelling import group_words
from miles.config.suggest import nearest_flag
from miles.config.vllm.environment import INSTALL, clean_environment, missing_vllm, vllm_python
from miles.config.vllm.flags import OTHER_PARALLEL, OWNED_BY_LAUNCHER, TENSOR_PARALLEL

JUDGE_SECONDS = 300.0
CHUNKED_PREFILL = "--enable-chunked-prefill"
MOST_SUPPORT_TOKENS = 4096  # tokens of a support, each some 60 bytes of an answer
# vLLM 0.32.0, v1/attention/backends/cpu_attn.py
HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# Reads flags as JSON, each with its values. Prints as JSON vLLM's flags, the words of each flag that its parser does
# not know, and its complaints about each flag alone, or if there are none, about all together.
_JUDGE = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
class Complaint(Exception): pass
class Parser(FlexibleArgumentParser):
    def error(self, message): raise Complaint(message)
parser = make_arg_parser(Parser())
verdict = {"flags": sorted(parser._option_string_actions), "unknown": [], "complaints": []}
def unknown(words):
    try:
        return parser.parse_known_args(words)[1]
    except Complaint as complaint:
        verdict["complaints"].append(str(complaint))
        return []
each = json.loads(sys.argv[1])
verdict["unknown"] = [unknown(words) for words in each]
if not verdict["complaints"]:
    unknown(sum(each, []))
os.write(out, json.dumps(verdict).encode())
"""


def check_servers(settings: Settings, errors: Errors) -> None:
    """Check a run that generates with vLLM's servers."""
    sglang, rollout, training = settings.sglang, settings.rollout, settings.training
    _check_words(settings, errors)
    if sglang.rollout_external:
        rule = "names SGLang's servers: vLLM's calls for weights have no key, so a run starts its own"
        errors.refuse("rollout_external", True, rule, "drop it")
    if settings.generates and errors.none_about("num_gpus_per_node") and settings.nodes_per_engine > 1:
        size = sglang.rollout_num_gpus_per_engine
        rule = "spans several nodes, and vLLM's servers listen on loopback only"
        errors.refuse("rollout_num_gpus_per_engine", size, rule, "give a smaller size, or use --rollout-engine sglang")
    if settings.cluster.ray_address is not None:
        rule = "joins hosts, and vLLM's servers listen on the loopback interface of one"
        errors.refuse("ray_address", settings.cluster.ray_address, rule, "drop it, or use --rollout-engine sglang")
    for name, is_set in (("fp32_lm_head", training.fp32_lm_head), ("deterministic_mode", training.deterministic_mode)):
        if is_set and settings.generates:
            errors.refuse(name, True, "is not possible with --rollout-engine vllm", "drop one of the two")
    if rollout.truncates_sampling and not settings.reads_samples:
        _check_truncated(settings, errors)
    _check_model(settings, errors)


def _check_words(settings: Settings, errors: Errors) -> None:
    flags, size = settings.server_flags, settings.sglang.rollout_num_gpus_per_engine
    for name, values in group_words(flags.vllm):
        written = spelled(VLLM, name)
        if name in OWNED_BY_LAUNCHER:
            errors.add(f"{written}: {OWNED_BY_LAUNCHER[name]}; drop {written}")
        elif name in TENSOR_PARALLEL and values != (str(size),):
            text = " ".join(values)
            rule = f"contradicts --rollout-num-gpus-per-engine {size}"
            errors.add(f"{written} {text}: {rule}; give {text} to that, drop this")
        elif name == CHUNKED_PREFILL and is_on_cpu(settings):
            rule = "vLLM ends on CPU when a request with a seed is prefilled in parts"
            errors.add(f"{written}: {rule}; drop {written}")
        elif name in OTHER_PARALLEL and values != ("1",):
            what_to_do = f"give --rollout-num-gpus-per-engine, and drop {written}"
            errors.add(f"{written}: an engine here is tensor parallel; {what_to_do}")
    if (quantization := value_of(flags.vllm, "--quantization")) is not None and not settings.rollout.debug_rollout_only:
        errors.refuse("vllm_quantization", quantization, f"vLLM {QUANTIZED_AT_START}", "drop it")


def _check_truncated(settings: Settings, errors: Errors) -> None:
    """Check that vLLM can give the values that the trainer needs of tokens that top-p, top-k or min-p chose from."""
    rollout = settings.rollout
    if not rollout.replays_support:
        if rollout.rollout_temperature != 1:
            rule = "at --no-support-replay, vLLM gives log-probs over the whole vocabulary at temperature 1 only"
            what_to_do = "drop --no-support-replay, or give 1"
            errors.refuse("rollout_temperature", rollout.rollout_temperature, rule, what_to_do)
    elif not 0 < rollout.rollout_top_k <= MOST_SUPPORT_TOKENS:
        names = changed(rollout, ["rollout_top_p", "rollout_min_p"]) or ["rollout_top_k"]
        name = "rollout_top_k" if rollout.rollout_top_k > 0 else names[0]
        rule = (
            "vLLM states which tokens it keeps, so that the trainer can repeat it, under a --rollout-top-k of at most "
            f"{MOST_SUPPORT_TOKENS}"
        )
        what_to_do = "give --rollout-top-k 1024, use --rollout-engine torch, or add --no-support-replay"
        errors.refuse(name, getattr(rollout, name), rule, what_to_do)


def _check_model(settings: Settings, errors: Errors) -> None:
    if not is_on_cpu(settings) or not settings.generates or not errors.none_about("hf_checkpoint"):
        return
    config = readable_config(settings.model) or {}
    config = config.get("text_config") or config
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if size is not None and size not in HEAD_SIZES_ON_CPU:
        sizes = ", ".join(map(str, HEAD_SIZES_ON_CPU))
        rule = f"vLLM's attention on CPU takes heads of {sizes}, and this model's are {size}"
        errors.refuse("hf_checkpoint", settings.model.hf_checkpoint, rule, "use another --rollout-engine")


def check_start(settings: Settings, errors: Errors) -> None:
    """Refuse a run that would fail at its start: vLLM is not installed, or its parser refuses a flag."""
    python, words = vllm_python(settings.vllm.vllm_python), settings.server_flags.vllm
    missing = missing_vllm(python)
    if missing is not None:
        errors.add(missing)
    elif words:
        for complaint in _complaints(python, words):
            errors.add(complaint)


@cache
def _complaints(python: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the objections of vLLM's parser to ``words``, as errors."""
    judged = subprocess.run(
        [python, "-P", "-c", _JUDGE, json.dumps([[name, *values] for name, values in group_words(words)])],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JUDGE_SECONDS,
    )
    try:
        verdict = json.loads(judged.stdout)
    except ValueError:
        last = judged.stderr.strip().splitlines()[-1:]
        return (f"--vllm-python {python}: vLLM's parser does not run ({''.join(last)}); install it with `{INSTALL}`",)
    return tuple(_in_words(verdict, words))


def _in_words(verdict: dict[str, Any], words: Sequence[str]) -> Iterable[str]:
    for word in (unknown[0] for unknown in verdict["unknown"] if unknown):  # what follows it are its values
        if not word.startswith("--"):
            yield f"{VLLM[:-1]}: {word} belongs to no flag of vLLM; write a value with spaces in quotes"
            continue
        name = word.split("=")[0]
        near = nearest_flag(name, verdict["flags"])
        what_to_do = f"did you mean {spelled(VLLM, near)}?" if near else f"drop {spelled(VLLM, name)}"
        yield f"{spelled(VLLM, name)}: the installed vLLM has no such flag; {what_to_do}"
    for complaint in verdict["complaints"]:
        names, _, text = complaint.removeprefix("argument ").partition(": ")
        flags = [word.split("=")[0] for word in words if word.split("=")[0] in names.split("/")]
        written = VLLM + (flags or names.split("/"))[0].lstrip("-")
        yield f"{written}: vLLM's parser states {text or names}; correct the value"
