"""Changes of a command that may save memory. Each is tried, and its saving is traced, not estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from miles.config.components import train_backend_spec
from miles.config.settings import Settings
from miles.config.validate import validate


@dataclass(frozen=True)
class Change:
    """One change: the flags in words, and the sections that it replaces."""

    words: str
    sections: Callable[[Settings], dict[str, Any]]

    def applied(self, settings: Settings) -> Settings:
        """Return the changed settings. Raises ``FlagError`` if they are not valid."""
        return validate(replace(settings, **self.sections(settings))).settings


def _set(section: str, words: str, **values: Any) -> Change:
    return Change(words, lambda settings: {section: replace(getattr(settings, section), **values)})


def changes(settings: Settings) -> Iterator[Change]:
    """Yield the changes that apply to ``settings``."""
    training, megatron, loss = settings.training, settings.megatron, settings.loss
    is_recomputed = training.gradient_checkpointing or "recompute_granularity" in dict(settings.megatron_overrides)
    if not is_recomputed:
        yield _set("training", "--gradient-checkpointing", gradient_checkpointing=True)
    if training.max_tokens_per_gpu is not None and training.max_tokens_per_gpu > 1:
        half = training.max_tokens_per_gpu // 2
        yield _set("training", f"--max-tokens-per-gpu {half}", max_tokens_per_gpu=half)
    elif not training.use_dynamic_batch_size and training.micro_batch_size > 1:
        half = training.micro_batch_size // 2
        yield _set("training", f"--micro-batch-size {half}", micro_batch_size=half)
    if not settings.parallel.dynamic_context_parallel and not settings.parallel.pads:
        size = settings.parallel.context_parallel_size * 2
        yield _set("parallel", f"--context-parallel-size {size}", context_parallel_size=size)
    if loss.log_probs_chunk_size == -1 or loss.log_probs_chunk_size > 512:
        yield _set("loss", "--log-probs-chunk-size 512", log_probs_chunk_size=512)
    if train_backend_spec(training.train_backend).reads_megatron_flags:
        if not megatron.divides_optimizer:
            yield _set("megatron", "--use-distributed-optimizer", use_distributed_optimizer=True)
        if not megatron.optimizer_cpu_offload:
            yield _set("megatron", "--optimizer-cpu-offload", optimizer_cpu_offload=True)
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        words = f"--tensor-model-parallel-size {tp * 2} --sequence-parallel"
        yield _set("megatron", words, tensor_model_parallel_size=tp * 2, sequence_parallel=True)
        words = f"--pipeline-model-parallel-size {pp * 2}"
        yield _set("megatron", words, pipeline_model_parallel_size=pp * 2)
        if megatron.expert_model_parallel_size > 1:
            ep = megatron.expert_model_parallel_size * 2
            yield _set("megatron", f"--expert-model-parallel-size {ep}", expert_model_parallel_size=ep)
    nodes = settings.cluster.actor_num_nodes * 2
    yield _set("cluster", f"--actor-num-nodes {nodes}", actor_num_nodes=nodes)
