"""The flags of runs that generate with vLLM; ``--vllm-*`` are passed on to its servers (rules.py)."""

from dataclasses import dataclass
from typing import Optional

from miles.base.flags import flag

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
