"""What the parallel section must satisfy beyond ``ParallelDims``: one layout of tokens, and room for a response."""

from __future__ import annotations

from miles.arguments.parallel import ParallelArguments
from miles.arguments.training import TrainingArguments
from miles.flags import at_least, refuse, refuse_ignored
from miles.parallel.dims import ParallelDims


def check_parallel(
    parallel: ParallelArguments, training: TrainingArguments, dims: ParallelDims, max_response_len: int
) -> None:
    """``dims`` divides the trainer's ranks as ``parallel`` says; ``max_response_len`` is in tokens."""
    at_least(parallel, 2, "max_seqlen_per_dp_cp_rank")
    _check_layout(parallel)
    if parallel.dynamic_context_parallel:
        _check_dynamic(parallel, training)
        _check_room(parallel, dims, max_response_len)
    else:
        why = "without --dynamic-context-parallel"
        refuse_ignored(parallel, ["max_seqlen_per_dp_cp_rank"], why, "add that switch")


def _check_layout(parallel: ParallelArguments) -> None:
    shares_sequences = parallel.context_parallel_size > 1 or parallel.dynamic_context_parallel
    if parallel.qkv_format == "bshd" and shares_sequences:
        shared = (
            "--dynamic-context-parallel"
            if parallel.dynamic_context_parallel
            else f"--context-parallel-size {parallel.context_parallel_size}"
        )
        refuse("qkv_format", "bshd", f"padded lengths are not known under {shared}", "use --qkv-format thd")


def _check_room(parallel: ParallelArguments, dims: ParallelDims, max_response_len: int) -> None:
    assert parallel.max_seqlen_per_dp_cp_rank is not None
    ranks, sharing = dims.token_ranks, dims.context_sizes[-1]
    room = parallel.max_seqlen_per_dp_cp_rank * sharing
    if room <= max_response_len:
        rule = f"{sharing} of {ranks} ranks can share a sequence, {room} tokens; --rollout-max-response-len is more"
        way_out = f"give more than {max_response_len // sharing}, with room for the prompt"
        refuse("max_seqlen_per_dp_cp_rank", parallel.max_seqlen_per_dp_cp_rank, rule, way_out)


def _check_dynamic(parallel: ParallelArguments, training: TrainingArguments) -> None:
    if parallel.max_seqlen_per_dp_cp_rank is None:
        way_out = "add --max-seqlen-per-dp-cp-rank, the tokens that one rank can hold"
        refuse("dynamic_context_parallel", True, "needs the token budget of a rank", way_out)
    why, way_out = "by --dynamic-context-parallel, which packs by --max-seqlen-per-dp-cp-rank", "drop that switch"
    refuse_ignored(
        training, ["use_dynamic_batch_size", "max_tokens_per_gpu", "micro_batch_size", "balance_data"], why, way_out
    )
