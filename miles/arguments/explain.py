"""What a command would do, in one screen: --explain."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from miles.arguments.settings import Settings
from miles.arguments.validate import Validated
from miles.objective.explain import clip_bounds, objective_formula, objective_in_words, token_weights
from miles.parallel.dims import ParallelDims

__all__ = ["explain", "objective_formula", "objective_in_words"]


def explain(validated: Validated) -> str:
    """The text that ``--explain`` prints: objective, arithmetic of a step, notes, idle flags, files and processes."""
    settings = validated.settings
    sections = [
        ("Objective", [objective_in_words(settings), "", *objective_formula(settings).splitlines()]),
        ("Weight of one token", _weights(settings)),
        ("Batch", _batch(settings)),
        ("Read as", list(validated.notes)),
        ("Without effect in this run", without_effect(settings)),
        ("Files", _files(settings)),
        ("Processes", _processes(settings)),
    ]
    return "\n\n".join(_section(title, lines) for title, lines in sections if lines)


def _section(title: str, lines: Iterable[str]) -> str:
    wrapped = (part for line in lines for part in (textwrap.wrap(line, 110) if len(line) > 110 else [line]))
    return "\n".join([title, *(f"  {line}".rstrip() for line in wrapped)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _weights(settings: Settings) -> list[str]:
    longest = settings.rollout.rollout_max_response_len
    assert longest is not None
    short = max(1, longest // 8)
    lines = [
        f"half of the prompts mixed (answers of {short} and of {longest} tokens), half with answers of {longest} only:",
        f"{'':14}{'short, mixed':>14}{'long, mixed':>14}{'all long':>14}",
    ]
    for mode, weights in token_weights(settings, short, longest).items():
        custom = settings.loss.custom_pg_loss_reducer_function_path is not None
        mark = "  <- this run" if mode == settings.loss.loss_aggregation and not custom else ""
        lines.append(f"{mode:14}" + "".join(f"{weight:>14.2e}" for weight in weights) + mark)
    return lines


def _batch(settings: Settings) -> list[str]:
    rollout, dims = settings.rollout, settings.dims
    steps = settings.steps_per_iteration
    per_rank = settings.global_batch_size / dims.token_ranks
    length = (
        f"{_count(rollout.num_rollout, 'rollout')}, {_count(rollout.num_rollout * steps, 'optimizer step')}"
        if rollout.num_rollout is not None
        else f"--num-epoch {rollout.num_epoch} over the prompts, {_count(steps, 'optimizer step')} a rollout"
    )
    cut = _cut(settings)
    return [
        f"generate   {rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} samples "
        f"= {_count(settings.trajectories_per_iteration, 'rollout')}",
        f"a step     N = {settings.global_batch_size} rollouts, {_count(steps, 'step')} from each generation",
        f"a rank     {per_rank:g} rollouts a step on average, over {_ranks(dims)}{_sharing(settings)}, "
        f"in micro-batches {cut}",
        f"the run    {length}",
    ]


def _ranks(dims: ParallelDims) -> str:
    if dims.model_parallel_size == 1:
        return _count(dims.token_ranks, "rank")
    groups = _count(dims.token_ranks, "group")
    return f"{groups} of {dims.model_parallel_size} ranks that hold the same samples"


def _cut(settings: Settings) -> str:
    training, parallel = settings.training, settings.parallel
    if parallel.dynamic_context_parallel:
        return f"of up to {parallel.max_seqlen_per_dp_cp_rank} tokens a rank"
    if training.use_dynamic_batch_size:
        assert training.max_tokens_per_gpu is not None
        return f"filled up to {training.max_tokens_per_gpu * parallel.context_parallel_size} tokens"
    return f"of {_count(training.micro_batch_size, 'sample')}"


def _sharing(settings: Settings) -> str:
    if settings.parallel.dynamic_context_parallel:
        return " (as few share a sequence as it needs)"
    size = settings.parallel.context_parallel_size
    sharing = str(size) if settings.dims.model_parallel_size == 1 else f"{size} groups"
    return f" ({sharing} share each sequence)" if size > 1 else ""


def without_effect(settings: Settings) -> list[str]:
    """Settings that are valid and change nothing here, each with the reason."""
    loss, rollout = settings.loss, settings.rollout
    idle = []
    if loss.loss_type == "policy_loss" and settings.steps_per_iteration == 1:
        low, high = clip_bounds(loss)
        idle.append(f"clip range [{low:g}, {high:g}]: one step a rollout, so the ratio is 1 and nothing is clipped")
        if loss.eps_clip_c is not None:
            idle.append("--eps-clip-c: the same")
        if loss.advantage_estimator == "gspo":
            idle.append("--advantage-estimator gspo: one step a rollout, so every ratio is 1, as under grpo")
        if loss.use_opsm:
            idle.append("--use-opsm: one step a rollout, so no sequence is away from the old policy")
    if loss.has_critic and settings.steps_per_iteration == 1:
        idle.append("--value-clip: one step a rollout, so the critic's values are the old ones and nothing is clipped")
    if loss.custom_pg_loss_reducer_function_path is not None:
        idle.append(
            "--loss-canary: what your reducer's weights add up to is not known beforehand, so nothing is checked"
        )
    if rollout.rollout_temperature == 0:
        idle.append("--rollout-top-p, --rollout-top-k: greedy sampling takes the most likely token")
    if settings.training.balance_data and settings.dims.replicas == 1:
        idle.append("--balance-data: every rank has every sample")
    if rollout.load_debug_rollout_data is not None:
        idle.append("prompts and sampling flags: samples are read from --load-debug-rollout-data")
    if settings.cluster.colocate and settings.cluster.rollout_num_gpus is not None:
        idle.append("--rollout-num-gpus: the devices are shared (--colocate)")
    return idle


def _files(settings: Settings) -> list[str]:
    tracking, checkpoint = settings.tracking, settings.checkpoint
    names = "metrics.jsonl, samples.jsonl, run.json, tensorboard/" + ("" if tracking.no_report else ", report.html")
    lines = [f"{tracking.output_dir}: {names}"]
    if checkpoint.save is not None:
        when = f"every {checkpoint.save_interval} rollouts and" if checkpoint.save_interval else "only"
        lines.append(f"{checkpoint.save}: checkpoints, {when} after the last rollout")
    if checkpoint.save_hf is not None:
        lines.append(f"{checkpoint.save_hf}: Hugging Face export at the end")
    if settings.rollout.save_debug_rollout_data is not None:
        lines.append(f"{settings.rollout.save_debug_rollout_data}: the samples of each rollout")
    return lines


def _engines(settings: Settings) -> str:
    if settings.rollout.rollout_engine == "torch":
        return "the torch engine"
    if settings.sglang.rollout_external:
        return _count(len(settings.sglang.rollout_external_engine_addrs or ()), "external SGLang engine")
    devices = _count(settings.sglang.rollout_num_gpus_per_engine, "device")
    return f"{_count(settings.num_engines, 'SGLang engine')} of {devices}"


def _processes(settings: Settings) -> list[str]:
    cluster = settings.cluster
    ray = f"joins the Ray cluster at {cluster.ray_address}" if cluster.ray_address else "starts a local Ray"
    engine = (
        f"1 rollout actor with {_engines(settings)}" if settings.generates else "1 rollout actor, without an engine"
    )
    shared = ", on shared devices" if cluster.colocate else ""
    return [
        f"{ray}: {engine}, {_count(cluster.world_size, 'trainer rank')} "
        f"on {_count(cluster.actor_num_nodes, 'node')} "
        f"with {settings.training.train_backend}{shared}; device: {cluster.device}",
        *(["each trainer rank holds the policy and the critic"] if settings.loss.has_critic else []),
    ]
