"""Pass ``--vllm-*`` on to vLLM's servers, whose own parser judges these flags in vLLM's environment.

vLLM wants other versions of packages than a run has, so it is in a separate environment (scripts/vllm.sh).
Importing its parser takes seconds: that is done once per command, and only if it has such flags.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Optional

from miles.base.flags import Errors, flag
from miles.config.sglang.flags import VLLM
from miles.config.suggest import nearest_flag
from miles.config.vllm.environment import INSTALL, clean_environment, missing_vllm, vllm_python

JUDGE_SECONDS = 300.0
# Flags that the launcher sets, and to what or why.
OWNED_BY_LAUNCHER = {
    **dict.fromkeys(("--model", "--model-tag", "--served-model-name"), "the launcher sets it to --hf-checkpoint"),
    **dict.fromkeys(("--host", "--port", "--uds"), "the launcher sets it: servers listen on a free port of loopback"),
    **dict.fromkeys(("--api-key", "--middleware"), "the launcher sets it: every run makes its own keys"),
    "--weight-transfer-config": "the launcher sets it: servers take weights by --update-weight-transfer-mode",
    "--logprobs-mode": "the launcher sets it: log-probs are those of the distribution that is sampled from",
    "--max-logprobs": "the launcher sets it: as many as --rollout-top-k keeps",
    "--generation-config": "the launcher sets it: the flags of a run alone say how tokens are drawn",
    "--skip-tokenizer-init": "the launcher sets it, unless --rollout-stop or images need it: requests have token ids",
    "--enable-scale-out": "the launcher sets it: requests have token ids",
    "--tokens-only": "the launcher sets --enable-scale-out instead",
    "--config": "a run checks what its own files ask for; give the flags in it as --vllm-NAME",
}
# A server here is one tensor-parallel group; devices of other kinds of parallelism would not be counted.
TENSOR_PARALLEL = ("--tensor-parallel-size",)
OTHER_PARALLEL = ("--pipeline-parallel-size", "--data-parallel-size", "--nnodes", "--api-server-count")

# Prints as JSON which words vLLM's parser does not know, or its complaint about a value.
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
verdict = {"flags": sorted(parser._option_string_actions), "unknown": [], "complaint": None}
try:
    verdict["unknown"] = parser.parse_known_args(sys.argv[1:])[1]
except Complaint as complaint:
    verdict["complaint"] = str(complaint)
os.write(out, json.dumps(verdict).encode())
"""


@dataclass(frozen=True)
class VllmArguments:
    """vllm: vLLM's servers (`--rollout-engine vllm`). Further `--vllm-NAME` flags go to them as `--NAME`."""

    vllm_python: Optional[str] = flag(
        None,
        "interpreter of the environment that has vLLM; default: this one, if it has vLLM, else that of .venv-vllm next "
        "to it, which scripts/vllm.sh makes",
        needs="servers of vLLM",
        metavar="PYTHON",
    )
    vllm_cpu_cache_gib: int = flag(
        1, "on CPU: GiB of memory for the keys and values of each server", needs="servers of vLLM", at_least=1
    )


def check_start(settings: Any, errors: Errors) -> None:
    """Refuse a run that would fail at its start: vLLM is not installed, or its parser refuses a flag."""
    python, words = vllm_python(settings.vllm.vllm_python), settings.server_flags.vllm
    if (missing := missing_vllm(python)) is not None:
        errors.add(missing)
    elif words:
        for message in _complaints(python, tuple(words)):
            errors.add(message)


@cache
def _complaints(python: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the objections of vLLM's parser to ``words``, as errors."""
    judged = subprocess.run(
        [python, "-P", "-c", _JUDGE, *words],
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
    for word in verdict["unknown"]:
        if not word.startswith("--"):
            yield f"{VLLM[:-1]}: {word} belongs to no flag of vLLM; write a value with spaces in quotes"
            continue
        name = word.split("=")[0]
        near = nearest_flag(name, verdict["flags"])
        what_to_do = f"did you mean {VLLM}{near[2:]}?" if near else f"drop {VLLM}{name[2:]}"
        yield f"{VLLM}{name[2:]}: the installed vLLM has no such flag; {what_to_do}"
    if verdict["complaint"]:
        names, _, text = verdict["complaint"].removeprefix("argument ").partition(": ")
        flags = [word.split("=")[0] for word in words if word.split("=")[0] in names.split("/")]
        written = VLLM + (flags or names.split("/"))[0].lstrip("-")
        yield f"{written}: vLLM's parser states {text or names}; correct the value"
