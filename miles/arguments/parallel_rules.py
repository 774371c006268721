"""What the parallel section must satisfy: sizes that divide the ranks, and one way to cut sequences at a time."""

from __future__ import annotations

from miles.arguments.parallel import ParallelArguments
from miles.arguments.training import TrainingArguments
from miles.flags import at_least, refuse, refuse_ignored


def check_parallel(parallel: ParallelArguments, training: TrainingArguments, ranks: int, max_response_len: int) -> None:
    """``ranks`` is the number of trainer ranks; ``max_response_len`` that of a response."""
    at_least(parallel, 1, "context_parallel_size")
    at_least(parallel, 2, "max_seqlen_per_dp_cp_rank")
    _check_layout(parallel)
    if parallel.dynamic_context_parallel:
        _check_dynamic(parallel, training)
        _check_room(parallel, ranks, max_response_len)
    else:
        why = "without --dynamic-context-parallel"
        refuse_ignored(parallel, ["max_seqlen_per_dp_cp_rank"], why, "add that switch")
    if ranks % parallel.context_parallel_size:
        rule = f"must divide the {ranks} ranks that hold different tokens (all trainer ranks, over tensor and pipeline)"
        refuse("context_parallel_size", parallel.context_parallel_size, rule, f"give a divisor of {ranks}")


def _check_layout(parallel: ParallelArguments) -> None:
    shares_sequences = parallel.context_parallel_size > 1 or parallel.dynamic_context_parallel
    if parallel.qkv_format == "bshd" and shares_sequences:
        shared = (
            "--dynamic-context-parallel"
            if parallel.dynamic_context_parallel
            else f"--context-parallel-size {parallel.context_parallel_size}"
        )
        refuse("qkv_format", "bshd", f"padded lengths are not known under {shared}", "use --qkv-format thd")


def _check_room(parallel: ParallelArguments, ranks: int, max_response_len: int) -> None:
    assert parallel.max_seqlen_per_dp_cp_rank is not None
    sharing = ranks & -ranks  # the largest power of two that divides them
    room = parallel.max_seqlen_per_dp_cp_rank * sharing
    if room <= max_response_len:
        rule = f"{sharing} of {ranks} ranks can share a sequence, {room} tokens; --rollout-max-response-len is more"
        way_out = f"give more than {max_response_len // sharing}, with room for the prompt"
        refuse("max_seqlen_per_dp_cp_rank", parallel.max_seqlen_per_dp_cp_rank, rule, way_out)


def _check_dynamic(parallel: ParallelArguments, training: TrainingArguments) -> None:
    if parallel.context_parallel_size > 1:
        rule = "fixes what --dynamic-context-parallel chooses for each micro-batch"
        refuse("context_parallel_size", parallel.context_parallel_size, rule, "keep one of the two")
    if parallel.max_seqlen_per_dp_cp_rank is None:
        way_out = "add --max-seqlen-per-dp-cp-rank, the tokens that one rank can hold"
        refuse("dynamic_context_parallel", True, "needs the token budget of a rank", way_out)
    why, way_out = "by --dynamic-context-parallel, which packs by --max-seqlen-per-dp-cp-rank", "drop that switch"
    refuse_ignored(
        training, ["use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size", "balance_data"], why, way_out
    )
