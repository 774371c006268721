"""Explain the run that a command would start, on one screen: ``--explain``. Each section describes its own part."""

import textwrap
from collections.abc import Iterable, Sequence

from miles.base.flags import count
from miles.config.checkpoint import explain_checkpoint
from miles.config.cluster import explain_cluster
from miles.config.functions import explain_functions
from miles.config.host_share import host_line
from miles.config.inputs import explain_inputs
from miles.config.lora import explain_lora
from miles.config.model import explain_reference
from miles.config.notes import grouped
from miles.config.parallel import explain_ranks
from miles.config.profiling import explain_profiling
from miles.config.rollout import explain_generation, explain_length, explain_saved_samples, unused_in_rollout
from miles.config.servers.flags import explain_servers
from miles.config.settings import Settings
from miles.config.tracking import explain_tracking
from miles.config.training import explain_step, unused_in_training
from miles.config.validate import Validated
from miles.objective.aggregation import token_weights
from miles.objective.chosen import objective_in_words, objective_terms, objective_without_effect
from miles.tasks.data.settings import explain_prompts

WIDTH = 110
_LISTED = 4  # groups of ranks that are listed, before and after "..."
_EXAMPLE_LENGTH = 1024  # tokens of an answer if no limit is given: conversations to train on need none


def explain(validated: Validated) -> str:
    """Return the text that ``--explain`` prints."""
    settings = validated.settings
    memory = [*explain_memory(settings), *explain_lora(settings.lora)]
    parts: dict[str, Sequence[str]] = {
        "Objective": _objective(settings),
        "Weight of one token": _weights(settings),
        "Batch": _batch(settings),
        "Data": [] if validated.inputs is None else explain_inputs(settings, validated.inputs),
        "Backend and engine": [*filter(None, [validated.choice]), host_line(settings)],
        "Layout": explain_layout(settings),
        "Precision and memory": [explain_precision(settings), *explain_rate(settings), *memory],
        "Replaced settings of files": [*filter(None, [", ".join(validated.replaced)])],
        "Read as": validated.readings,
        "Notes": validated.surprises,
        "Accepted (--strict-flags refuses what has no effect)": grouped(validated.accepted),
        "Without effect in this run": without_effect(settings),
        "Your functions": [*explain_functions(settings)],
        "Files": _files(settings),
        "Processes": _processes(settings),
    }
    return "\n\n".join(_part(title, lines) for title, lines in parts.items() if lines)


def _part(title: str, lines: Iterable[str]) -> str:
    wrapped = (row for line in lines for row in _wrapped(line))
    return "\n".join([title, *(f"  {line}".rstrip() for line in wrapped)])


def _wrapped(line: str) -> list[str]:
    """Break a long line; its rest has the same indentation."""
    if len(line) <= WIDTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _objective(settings: Settings) -> list[str]:
    """Return the objective in words, then each term, and the file or the function that computes it."""
    facts = settings.loss, settings.step_shape, settings.added_losses
    lines = [objective_in_words(*facts), ""]
    terms = objective_terms(*facts)
    column = min(60, max(len(term.text) for term in terms))
    for term in terms:
        line = f"{term.text:<{column}}  [{term.source}]"
        lines += [line] if len(line) <= WIDTH else [term.text, f"{'':<{column}}  [{term.source}]"]
    return lines


def _weights(settings: Settings) -> list[str]:
    longest = settings.rollout.rollout_max_response_len or _EXAMPLE_LENGTH
    short = max(1, longest // 8)
    lines = [
        f"half of the prompts mixed (answers of {short} and of {longest} tokens), half with answers of {longest} only:",
        f"{'':14}{'short, mixed':>14}{'long, mixed':>14}{'all long':>14}",
    ]
    has_reducer = settings.loss.custom_pg_loss_reducer_function_path is not None
    for mode, weights in token_weights(settings.loss, settings.step_shape, short, longest).items():
        mark = "  <- this run" if mode == settings.loss.loss_aggregation and not has_reducer else ""
        lines.append(f"{mode:14}" + "".join(f"{weight:>14.2e}" for weight in weights) + mark)
    return lines


def _batch(settings: Settings) -> list[str]:
    steps = settings.steps_per_iteration
    return [
        explain_generation(settings.rollout, settings.reads_conversations),
        explain_step(settings.training, steps),
        explain_ranks(settings.parallel, settings.training, settings.dims),
        explain_length(settings.rollout, steps),
        *explain_prompts(settings.data),
        *explain_reference(settings.model),
    ]


def without_effect(settings: Settings) -> list[str]:
    """List settings that are valid and change nothing in this run, each with the reason."""
    return [
        *objective_without_effect(settings.loss, settings.step_shape),
        *unused_in_rollout(settings.rollout),
        *unused_in_training(settings.training, settings.dims.replicas),
    ]


def _files(settings: Settings) -> list[str]:
    return [
        *explain_tracking(settings.tracking),
        *explain_profiling(settings.profiling, settings.tracking.output_dir, settings.rollout.num_rollout),
        *explain_checkpoint(settings.checkpoint),
        *explain_saved_samples(settings.rollout),
    ]


def _processes(settings: Settings) -> list[str]:
    engines = _engines(settings) if settings.generates else ""
    line = explain_cluster(settings.cluster, engines, settings.training.train_backend if settings.trains else None)
    return [line, "each trainer rank holds the policy and the critic"] if settings.loss.has_critic else [line]


def _engines(settings: Settings) -> str:
    if not settings.engine.has_servers:
        return f"the {settings.rollout.rollout_engine} engine"
    title, nodes = settings.engine.title, settings.nodes_per_engine
    workers = settings.rollout.num_rollout_workers
    senders = f" fed by {workers} processes" if workers > 1 else ""
    return f"{explain_servers(title, settings.sglang, settings.num_engines, nodes)}{senders}"


def explain_layout(settings: Settings) -> list[str]:
    """Return the division of the ranks, and which of them share tokens."""
    dims = settings.dims
    sizes = [
        f"TP {dims.tensor_model_parallel_size}",
        f"CP {'dynamic' if dims.dynamic_context_parallel else dims.context_parallel_size}",
        f"DP {dims.replicas}",
        f"PP {dims.pipeline_model_parallel_size}{_stages(settings)}",
    ]
    lines = [f"{count(dims.world_size, 'rank')} = {' x '.join(sizes)}"]
    if not settings.backend.reads_megatron_flags:
        lines[0] += "; every weight is divided over all ranks"
    nodes, per_node = settings.cluster.actor_num_nodes, settings.cluster.actor_num_gpus_per_node
    if nodes > 1 and settings.trains:
        of_nodes = [range(node * per_node, (node + 1) * per_node) for node in range(nodes)]
        lines.append(f"nodes: ranks {_groups(of_nodes)}")
    if dims.model_parallel_size > 1:
        lines.append(f"same tokens, other weights (TP, PP): ranks {_groups(dims.weight_groups)}")
    if dims.context_parallel_size > 1:
        lines.append(f"share each sequence (CP): ranks {_groups(dims.context_groups(dims.context_parallel_size))}")
    if dims.token_ranks > 1:
        lines.append(f"same weights, other tokens (DP, CP): ranks {_groups(dims.token_groups)}")
    has_experts = "num_moe_experts" in dict(settings.megatron_overrides)
    if dims.expert_model_parallel_size > 1 or has_experts:
        lines.append(
            f"experts: EP {dims.expert_model_parallel_size} x ETP {dims.ranks_per_expert_matrix}, "
            f"{count(dims.expert_replicas, 'replica')} of each expert in a stage"
        )
    return lines


def _stages(settings: Settings) -> str:
    """Return how many layers the first and the last pipeline stage have, where flags say that."""
    sizes = settings.megatron
    named = {"first": sizes.decoder_first_pipeline_num_layers, "last": sizes.decoder_last_pipeline_num_layers}
    parts = [f"{count(layers, 'layer')} in the {place} stage" for place, layers in named.items() if layers is not None]
    if sizes.num_layers_per_virtual_pipeline_stage is not None:
        parts.append(f"interleaved by {count(sizes.num_layers_per_virtual_pipeline_stage, 'layer')}")
    return f" ({', '.join(parts)})" if parts else ""


def _groups(groups: Sequence[Sequence[int]]) -> str:
    if len(groups) <= 2 * _LISTED:
        return " | ".join(map(_ranks, groups))
    return " | ".join([*map(_ranks, groups[:_LISTED]), "...", *map(_ranks, groups[-1:])])


def _ranks(ranks: Sequence[int]) -> str:
    """Spell ranks: ``0 1 2``, or ``0 2 .. 14`` if they are many at one distance."""
    if len(ranks) > _LISTED and len({after - before for before, after in zip(ranks, ranks[1:], strict=False)}) == 1:
        return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
    return " ".join(map(str, ranks))


def explain_precision(settings: Settings) -> str:
    """Return the precision that the run computes in."""
    repeats = "; deterministic kernels" if settings.training.deterministic_mode else ""
    if settings.training.fp32_lm_head:
        repeats = f"; fp32 logits{repeats}"
    if settings.training.bf16 and settings.lora.trains_adapter:
        return f"precision  bf16 compute and frozen weights; fp32 adapter, gradients, reductions and loss{repeats}"
    if settings.training.bf16:
        return f"precision  bf16 compute; fp32 master weights, gradients, reductions and loss{repeats}"
    return f"precision  fp32 everywhere{repeats}"


def explain_rate(settings: Settings) -> list[str]:
    """Return the learning rate over the run; nothing for a run that trains nothing."""
    optimizer = settings.optimizer
    if not settings.trains:
        return []
    parts = [f"{optimizer.lr:g}"]
    if optimizer.warmup_value:
        parts.append("after a warm-up")
    if optimizer.lr_decay_style != "constant":
        end = optimizer.lr_decay_iters
        when = "the end of the run" if end is None else f"step {end}"
        parts.append(f"{optimizer.lr_decay_style} decay to {optimizer.min_lr:g} at {when} (--lr-decay-style)")
    return [f"lr         {', '.join(parts)}"]


def explain_memory(settings: Settings) -> list[str]:
    """Return the location of the optimizer's state, and the choices that memory depends on."""
    divided = not settings.backend.reads_megatron_flags or settings.megatron.divides_optimizer
    where = "divided over the ranks that hold the same weights" if divided else "whole on every rank of its weights"
    overrides = dict(settings.megatron_overrides)
    recomputes = settings.training.gradient_checkpointing or "recompute_granularity" in overrides
    chunk = settings.loss.log_probs_chunk_size
    logits = "whole logits of a micro-batch" if chunk == -1 else f"logits of {chunk} tokens at once"
    return [
        f"optimizer  fp32 state of AdamW (two moments), {where}, {_place_of_state(settings)}",
        f"memory     activations {'recomputed layer by layer' if recomputes else 'kept'}; {logits}",
        *_shared(settings),
    ]


def _place_of_state(settings: Settings) -> str:
    sizes = settings.megatron
    if not sizes.optimizer_cpu_offload or settings.cluster.device == "cpu":
        return "on the trainer's device"
    fraction = sizes.optimizer_offload_fraction
    part = "" if fraction == 1 else f" ({fraction:g} of it)"
    overlap = ", overlapped with the copies" if sizes.overlap_cpu_optimizer_d2h_h2d else ""
    return f"with the fp32 weights in host memory{part} and updated there{overlap}"


def _shared(settings: Settings) -> list[str]:
    if not (settings.cluster.colocate and settings.num_engines):
        return []
    if settings.cluster.device == "cpu":
        return ["shared     trainer and engines share devices; on CPU nothing is freed alternately"]
    offload = settings.offload("cuda")
    trainer = "waits in host memory while engines generate" if offload.train else "stays on the GPU"
    engines = "release their memory while the trainer works" if offload.rollout else "keep their memory"
    return [f"shared     on GPUs the trainer {trainer}; the engines {engines}"]
