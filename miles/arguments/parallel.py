"""How the sequences and the model are spread over the trainer's ranks."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


@dataclass(frozen=True)
class ParallelArguments:
    """parallel: context parallelism and the layout of sequences."""

    context_parallel_size: int = flag(1, "ranks that share one sequence in the trainer")
    dynamic_context_parallel: bool = flag(
        False, "each micro-batch is shared by as few ranks as its longest sequence needs (a power of two)"
    )
    max_seqlen_per_dp_cp_rank: Optional[int] = flag(
        None, "most tokens of a micro-batch on one rank, with --dynamic-context-parallel"
    )
    qkv_format: Literal["thd", "bshd"] = flag(
        "thd",
        "samples of a micro-batch in the trainer: packed into one sequence (thd) or padded to equal rows (bshd)",
    )
