"""Fit a run on CPU to this host: threads by its cores, an engine's simultaneous work by its memory.

The memory is the amount that this process may use: the machine's, or the limit of a container. It is not the amount
that is free at the moment, so that ``--explain``, the run and its repetition have the same values. On CUDA nothing is
chosen here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from miles.base.flags import count
from miles.base.host import GIB, busy_cores, has_bf16, has_gpu, memory_bytes
from miles.config.model import local_config
from miles.config.servers.passed_on import SERVER, has_flag, value_of
from miles.config.settings import Settings
from miles.models.packing import ROW_STEP, kv_bytes_per_token

CACHE_SHARE = 0.25  # of the memory, for keys and values; the rest is the trainer's and for weights
SERVER_TOKENS = 32768  # in a server's cache, if the memory allows it and the requests need no more
TOKENS_STEP = 1024  # a server's tokens are a multiple of it
SEQUENCES_STEP = 8  # and so are sequences, if there are more
PROMPT = 512  # tokens that a prompt is assumed to have if --rollout-max-prompt-len is not given
MOST_TOKENS = "--max-total-tokens"  # SGLang's flag


def is_on_cpu(settings: Settings) -> bool:
    """Return whether a run of this host is on CPU."""
    device = settings.cluster.device
    return device == "cpu" or (device == "auto" and not has_gpu())


def sharers_of_trainer(settings: Settings) -> int:
    """Return how many processes of a node compute while a trainer rank does; they share its cores."""
    generates_meanwhile = settings.rollout.async_steps > 0
    return settings.cluster.actor_num_gpus_per_node + generates_meanwhile


def sharers_at_start(settings: Settings) -> int:
    """Return how many processes of a node load their models at the same time: trainer ranks and an engine."""
    return settings.cluster.actor_num_gpus_per_node + 1


def sharers_of_engine(settings: Settings) -> int:
    """Return how many processes share the cores with the embedded engine."""
    return 1 if settings.cluster.colocate else 1 + settings.cluster.actor_num_gpus_per_node


def threads(sharers: int) -> int:
    """Return the threads of each of ``sharers`` processes that compute on this host at the same time."""
    return max(1, busy_cores() // sharers)


def fit_to_host(settings: Settings, set_fields: Collection[str]) -> Settings:
    """Return validated settings with the values that the memory of this host bounds, written out.

    The results of a run do not depend on it, but for the rounding of sums.

    Args:
        settings: Validated settings.
        set_fields: The fields that the user has set; they stay unchanged.
    """
    if not settings.generates or not is_on_cpu(settings):
        return settings
    per_token = _bytes_per_token(settings)
    if not settings.engine.has_servers:
        if per_token is None or "torch_engine_max_batch_size" in set_fields:
            return settings
        fitting = int(CACHE_SHARE * memory_bytes()) // (per_token * _row(settings))
        sequences = min(settings.rollout.torch_engine_max_batch_size, _rounded(fitting, SEQUENCES_STEP))
        return replace(settings, rollout=replace(settings.rollout, torch_engine_max_batch_size=sequences))
    passed_on = settings.server_flags
    if SERVER not in settings.engine.prefixes or not settings.num_engines or has_flag(passed_on.server, MOST_TOKENS):
        return settings
    words = (MOST_TOKENS, str(_server_tokens(settings, per_token)), *passed_on.server)
    return replace(settings, server_flags=replace(passed_on, server=words))


def _server_tokens(settings: Settings, per_token: int | None) -> int:
    """Return the tokens of a server's cache: what its requests need, as far as its share of the memory has room."""
    if per_token is None:
        return SERVER_TOKENS
    longest, engines = longest_sequence(settings), settings.num_engines
    requests = min(-(-settings.trajectories_per_iteration // engines), settings.sglang.sglang_server_concurrency)
    wanted = max(SERVER_TOKENS, -(-requests * longest // TOKENS_STEP) * TOKENS_STEP)
    fitting = int(CACHE_SHARE * memory_bytes()) // (engines * per_token)
    return max(longest, min(wanted, _rounded(fitting, TOKENS_STEP)))


def _rounded(number: int, step: int) -> int:
    """Round down to a multiple of ``step``, since kernels differ in the memory they report; at least 1."""
    return max(1, number if number < step else number // step * step)


def longest_sequence(settings: Settings) -> int:
    """Return the most tokens that prompt and response have together, as far as flags and the model say."""
    rollout = settings.rollout
    response = max(rollout.rollout_max_response_len or 1, settings.evaluation.eval_max_response_len or 1)
    prompt = settings.data.rollout_max_prompt_len or PROMPT
    longest = rollout.rollout_max_context_len or prompt + response
    limit = (text_config(settings) or {}).get("max_position_embeddings")
    return min(longest, limit or longest)


def _row(settings: Settings) -> int:
    """Return the tokens that a row of the embedded engine's cache has room for."""
    return -(-longest_sequence(settings) // ROW_STEP) * ROW_STEP


def text_config(settings: Settings) -> dict[str, Any] | None:
    """Return the configuration of the model's text part; None if it is not on this machine."""
    config = local_config(settings.model, "hf_checkpoint")
    return None if config is None else config.get("text_config") or config


def _bytes_per_token(settings: Settings) -> int | None:
    """Return the bytes of a token in the cache of the run's engine; None if the model's sizes are not at hand."""
    config = text_config(settings)
    if config is None:
        return None
    keeps_latent = settings.engine.has_servers
    try:
        return kv_bytes_per_token(config, 1, 2 if settings.training.bf16 else 4, keeps_latent)
    except (KeyError, TypeError, ValueError, ArithmeticError):  # of a type that names its sizes otherwise
        return None


def host_line(settings: Settings) -> str:
    """Say in one line what validated settings take of this host: ranks, threads, sequences at once, memory."""
    if not is_on_cpu(settings):
        return "; ".join(["CUDA", *_ranks(settings, ""), *_engine_on_cuda(settings)])
    cores = count(busy_cores(), "core")
    of_ranks = f" of {count(threads(sharers_of_trainer(settings)), 'thread')}"
    precision = "emulated bf16" if settings.training.bf16 else "fp32"
    computes = "" if has_bf16() else f" without bf16 arithmetic, so in {precision}"
    computing = [f"CPU with {cores}{computes}", *_ranks(settings, of_ranks)]
    if not settings.generates:
        return ", ".join(computing)
    name = settings.rollout.rollout_engine
    if not settings.engine.has_servers:
        computing.append(f"the {name} engine of {count(threads(sharers_of_engine(settings)), 'thread')}")
        sequences = settings.rollout.torch_engine_max_batch_size
        batch = f"{count(sequences, 'sequence')} at once"
        tokens = sequences * _row(settings)
    elif settings.num_engines:
        computing.append(f"{count(settings.num_engines, 'server')} of {name} of 1 thread")
        if SERVER not in settings.engine.prefixes:
            return f"{', '.join(computing)}; {settings.vllm.vllm_cpu_cache_gib} GiB for the cache of each"
        most = value_of(settings.server_flags.server, MOST_TOKENS) or str(SERVER_TOKENS)
        batch = f"{most} tokens in the cache of each"
        tokens = settings.num_engines * int(most) if most.isdigit() else 0
    else:
        return ", ".join([*computing, "engines that others have started"])
    return f"{', '.join(computing)}; {batch}, {_memory(settings, tokens)}"


def _ranks(settings: Settings, threads_of_each: str) -> list[str]:
    if not settings.trains:
        return []
    per_node = " per node" if settings.cluster.actor_num_nodes > 1 else ""
    return [f"{count(settings.cluster.actor_num_gpus_per_node, 'trainer rank')}{per_node}{threads_of_each}"]


def _engine_on_cuda(settings: Settings) -> list[str]:
    if not settings.generates or settings.sglang.rollout_external:
        return []
    engine = settings.engine
    if not engine.has_servers:
        return [f"{count(settings.rollout.torch_engine_max_batch_size, 'sequence')} at once"]
    flags = settings.server_flags
    share = value_of(flags.server, "--mem-fraction-static") or value_of(flags.vllm, "--gpu-memory-utilization")
    if share is None:
        return [f"batch and memory share as {engine.title} chooses them"]
    return [f"memory share {share} of {engine.title}"]


def _memory(settings: Settings, tokens: int) -> str:
    memory, per_token = memory_bytes(), _bytes_per_token(settings)
    whole = f"{memory / GIB:.1f} GiB"
    if per_token is None:
        return f"a part of {whole} that is not known: --hf-checkpoint has no config.json here with its sizes"
    size = tokens * per_token
    return f"up to {size / GIB:.2g} of {whole} ({size / memory:.1%}) for keys and values"
