"""How a step is computed: backend, batch sizes, precision."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


@dataclass(frozen=True)
class TrainingArguments:
    """training: backend, batch sizes, micro-batches and precision."""

    train_backend: Literal["fsdp", "megatron"] = flag("fsdp", "training backend")
    global_batch_size: Optional[int] = flag(None, "rollouts per optimizer step; default: all of a rollout's")
    num_steps_per_rollout: Optional[int] = flag(None, "optimizer steps per rollout, instead of --global-batch-size")
    micro_batch_size: int = flag(1, "samples per micro-batch, without --use-dynamic-batch-size")
    use_dynamic_batch_size: bool = flag(False, "fill micro-batches by tokens: --max-tokens-per-gpu each")
    max_tokens_per_gpu: Optional[int] = flag(
        None, "token budget of a micro-batch, with --use-dynamic-batch-size; packed, a shared prompt counts once"
    )
    balance_data: bool = flag(False, "spread samples over ranks by length (Karmarkar-Karp) instead of in order")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass to save memory")
    bf16: bool = flag(False, "compute in bfloat16, with fp32 master weights and fp32 reductions")
    seed: int = flag(1234, "seed of the trainer's random state")
