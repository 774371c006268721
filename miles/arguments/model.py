"""Which model is trained, and what it is compared with."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.arguments.flag import flag


@dataclass(frozen=True)
class ModelArguments:
    """model: weights, reference and layout of the sequences."""

    hf_checkpoint: Optional[str] = flag(
        None, "Hugging Face folder or name: tokenizer, config and initial weights (required)", metavar="PATH"
    )
    ref_load: Optional[str] = flag(
        None, "Hugging Face folder of the reference model for the KL; default --hf-checkpoint", metavar="PATH"
    )
    qkv_format: Literal["thd", "bshd"] = flag("thd", "packed (thd) or padded (bshd) sequences in the trainer")
    context_parallel_size: int = flag(1, "ranks that share one sequence in the trainer")
