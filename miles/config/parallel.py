"""Choose how sequences are divided over the trainer's ranks."""

from dataclasses import dataclass, replace
from typing import Literal, Optional, assert_never

from miles.base.flags import Errors, count, flag, flag_name
from miles.config.components import train_backend_spec
from miles.config.model import ModelArguments, local_config
from miles.config.training import TrainingArguments
from miles.models.packing import model_type, must_be_padded, why_not_shared, why_not_trained
from miles.types.dims import ParallelDims


@dataclass(frozen=True)
class ParallelArguments:
    """parallel: context parallelism and the layout of sequences."""

    context_parallel_size: int = flag(
        1, "ranks that share one sequence in the trainer", needs="layers that share sequences"
    )
    dynamic_context_parallel: bool = flag(
        False, "share each micro-batch among as few ranks as its longest sequence needs (a power of two)"
    )
    max_seqlen_per_dp_cp_rank: Optional[int] = flag(
        None,
        "maximum tokens of a micro-batch on one rank",
        needs="--dynamic-context-parallel",
        at_least=2,
    )
    qkv_format: Literal["thd", "bshd"] = flag(
        "thd", "samples of a micro-batch in the trainer: packed into one sequence (thd) or padded to equal rows (bshd)"
    )

    @property
    def pads(self) -> bool:
        """Whether the samples of a micro-batch are padded to equal rows, instead of packed into one sequence."""
        match self.qkv_format:
            case "thd":
                return False
            case "bshd":
                return True
            case unknown:
                assert_never(unknown)


def check_parallel(
    parallel: ParallelArguments,
    training: TrainingArguments,
    dims: ParallelDims | None,
    max_response_len: int | None,
    errors: Errors,
) -> None:
    """Check the rules beyond ``ParallelDims``: the layout of tokens, and room for a response.

    Args:
        parallel: The section.
        training: The section with the micro-batches.
        dims: The division of the ranks; None if a size is wrong.
        max_response_len: Maximum tokens of a response; None if it is not given.
        errors: Collects the errors.
    """
    _check_layout(parallel, errors)
    if parallel.dynamic_context_parallel:
        _check_dynamic(parallel, training, errors)
        if dims is not None and max_response_len is not None:
            _check_room(parallel, dims, max_response_len, errors)


def _check_layout(parallel: ParallelArguments, errors: Errors) -> None:
    if not parallel.pads:
        return
    shared = "--dynamic-context-parallel" if parallel.dynamic_context_parallel else None
    if shared is None and parallel.context_parallel_size > 1:
        shared = f"--context-parallel-size {parallel.context_parallel_size}"
    if shared is not None:
        rule = f"padded lengths are not known under {shared}"
        errors.refuse("qkv_format", parallel.qkv_format, rule, "use --qkv-format thd")


def _check_dynamic(parallel: ParallelArguments, training: TrainingArguments, errors: Errors) -> None:
    if parallel.max_seqlen_per_dp_cp_rank is None:
        what_to_do = "add --max-seqlen-per-dp-cp-rank, the tokens that one rank can hold"
        errors.refuse("dynamic_context_parallel", True, "needs the token budget of a rank", what_to_do)
    elif not same_budget(parallel, training):
        rule = f"is not the budget of --max-seqlen-per-dp-cp-rank {parallel.max_seqlen_per_dp_cp_rank}"
        errors.refuse("max_tokens_per_gpu", training.max_tokens_per_gpu, rule, "give both the same, or drop it")


def same_budget(parallel: ParallelArguments, training: TrainingArguments) -> bool:
    """Return whether dynamic context parallelism fills micro-batches as ``--use-dynamic-batch-size`` would."""
    budget = training.max_tokens_per_gpu
    return parallel.dynamic_context_parallel and budget in (None, parallel.max_seqlen_per_dp_cp_rank)


def _check_room(parallel: ParallelArguments, dims: ParallelDims, max_response_len: int, errors: Errors) -> None:
    budget = parallel.max_seqlen_per_dp_cp_rank
    if budget is None or not errors.none_about("max_seqlen_per_dp_cp_rank"):
        return
    ranks, sharing = dims.token_ranks, dims.context_sizes[-1]
    if budget * sharing <= max_response_len:
        rule = (
            f"{sharing} of {ranks} ranks can share a sequence, so {budget * sharing} tokens fit, and "
            f"--rollout-max-response-len is {max_response_len}"
        )
        what_to_do = f"give more than {max_response_len // sharing}, with room for the prompt"
        errors.refuse("max_seqlen_per_dp_cp_rank", budget, rule, what_to_do)


def pad_recurrent_models(
    parallel: ParallelArguments, training: TrainingArguments, model: ModelArguments, errors: Errors
) -> tuple[ParallelArguments, list[str]]:
    """Pad the samples of a model whose recurrent state may pass from one packed sample to the next.

    Args:
        parallel: The section.
        training: The section with the backend; some train no such model.
        model: The section with the models. The backend checks those that are not downloaded yet at run time.
        errors: Collects models that are not trained, and ranks that would share the sequences of a recurrent one.

    Returns:
        The section with ``qkv_format`` replaced, and a note if it was.
    """
    if not train_backend_spec(training.train_backend).trains_recurrent_models:
        return parallel, []
    notes: list[str] = []
    for name in ("hf_checkpoint", "ref_load", "opd_teacher_load"):
        path = getattr(model, name)
        config = None
        with errors.catching():
            config = local_config(model, name)
        if config is not None and (fault := why_not_trained(config)):
            errors.refuse(name, path, *fault)
            continue
        if config is None or (why := why_not_shared(config)) is None:
            continue
        what = f"{flag_name(name)} {path}, a {model_type(config)} {why}"
        rule = f"cuts sequences, and {what}, needs whole ones"
        if parallel.dynamic_context_parallel:
            errors.refuse("dynamic_context_parallel", True, rule, "drop it")
            break
        if parallel.context_parallel_size > 1:
            errors.refuse("context_parallel_size", parallel.context_parallel_size, rule, "drop it")
            break
        if must_be_padded(config) and not parallel.pads:
            notes.append(f"--qkv-format is bshd: packing the samples of {what}, has not been tested")
            parallel = replace(parallel, qkv_format="bshd")
    return parallel, notes


def explain_ranks(parallel: ParallelArguments, training: TrainingArguments, dims: ParallelDims) -> str:
    """Say how much of a step each rank computes, and how it is cut. The sections must be valid."""
    assert training.global_batch_size is not None
    average = training.global_batch_size / dims.token_ranks
    trajectories = f"{average:g} {'trajectory' if average == 1 else 'trajectories'}"
    return (
        f"a rank     {trajectories} per step on average, over {_ranks(dims)}{_sharing(parallel, dims)}, "
        f"in micro-batches {_cut(parallel, training)}"
    )


def _ranks(dims: ParallelDims) -> str:
    if dims.model_parallel_size == 1:
        return count(dims.token_ranks, "rank")
    return f"{count(dims.token_ranks, 'group')} of {dims.model_parallel_size} ranks that hold the same samples"


def _sharing(parallel: ParallelArguments, dims: ParallelDims) -> str:
    if parallel.dynamic_context_parallel:
        return " (as few share a sequence as it needs)"
    size = parallel.context_parallel_size
    sharing = str(size) if dims.model_parallel_size == 1 else f"{size} groups"
    return f" ({sharing} share each sequence)" if size > 1 else ""


def _cut(parallel: ParallelArguments, training: TrainingArguments) -> str:
    if parallel.dynamic_context_parallel:
        return f"of up to {parallel.max_seqlen_per_dp_cp_rank} tokens per rank"
    if training.use_dynamic_batch_size:
        assert training.max_tokens_per_gpu is not None
        return f"filled up to {training.max_tokens_per_gpu * parallel.context_parallel_size} tokens"
    return f"of {count(training.micro_batch_size, 'sample')}"
