"""Explain what a command would do, on one screen: ``--explain``. Each section describes its own part."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from miles.arguments.checkpoint import explain_checkpoint
from miles.arguments.cluster import explain_cluster
from miles.arguments.critic import explain_critic
from miles.arguments.parallel import explain_ranks
from miles.arguments.rollout import explain_generation, explain_length, explain_saved_samples, unused_in_rollout
from miles.arguments.settings import Settings
from miles.arguments.sglang.settings import explain_servers
from miles.arguments.tracking import explain_tracking
from miles.arguments.training import explain_step, unused_in_training
from miles.arguments.validate import Validated
from miles.objective.explain import clip_bounds, objective_formula, objective_in_words, token_weights

__all__ = ["explain", "objective_formula", "objective_in_words"]

WIDTH = 110


def explain(validated: Validated) -> str:
    """Return the text that ``--explain`` prints."""
    settings = validated.settings
    parts = [
        ("Objective", [objective_in_words(settings), "", *objective_formula(settings).splitlines()]),
        ("Weight of one token", _weights(settings)),
        ("Batch", _batch(settings)),
        ("Read as", list(validated.notes)),
        ("Without effect in this run", without_effect(settings)),
        ("Files", _files(settings)),
        ("Processes", _processes(settings)),
    ]
    return "\n\n".join(_part(title, lines) for title, lines in parts if lines)


def _part(title: str, lines: Iterable[str]) -> str:
    wrapped = (row for line in lines for row in (textwrap.wrap(line, WIDTH) if len(line) > WIDTH else [line]))
    return "\n".join([title, *(f"  {line}".rstrip() for line in wrapped)])


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
    steps = settings.steps_per_iteration
    return [
        explain_generation(settings.rollout),
        explain_step(settings.training, steps),
        explain_ranks(settings.parallel, settings.training, settings.dims),
        explain_length(settings.rollout, steps),
    ]


def without_effect(settings: Settings) -> list[str]:
    """List settings that are valid and change nothing in this run, each with the reason."""
    return [
        *_unused_in_loss(settings),
        *unused_in_rollout(settings.rollout),
        *unused_in_training(settings.training, settings.dims.replicas),
    ]


def _unused_in_loss(settings: Settings) -> Iterator[str]:
    loss = settings.loss
    if loss.loss_type == "policy_loss" and settings.steps_per_iteration == 1:
        low, high = clip_bounds(loss)
        yield f"clip range [{low:g}, {high:g}]: one step per iteration, so the ratio is 1 and nothing is clipped"
        if loss.eps_clip_c is not None:
            yield "--eps-clip-c: the same"
        if loss.advantage_estimator == "gspo":
            yield "--advantage-estimator gspo: one step per iteration, so every ratio is 1, as under grpo"
        if loss.use_opsm:
            yield "--use-opsm: one step per iteration, so no sequence differs from the old policy"
    if loss.has_critic and settings.steps_per_iteration == 1:
        yield "--value-clip: one step per iteration, so the critic's values are the old ones and nothing is clipped"
    if loss.custom_pg_loss_reducer_function_path is not None:
        yield "--loss-canary: the sum of your reducer's weights is not known beforehand, so nothing is checked"


def _files(settings: Settings) -> list[str]:
    return [
        *explain_tracking(settings.tracking),
        *explain_checkpoint(settings.checkpoint),
        *explain_saved_samples(settings.rollout),
    ]


def _processes(settings: Settings) -> list[str]:
    engines = _engines(settings) if settings.generates else ""
    return [
        explain_cluster(settings.cluster, engines, settings.training.train_backend),
        *explain_critic(settings.loss.has_critic),
    ]


def _engines(settings: Settings) -> str:
    engine = settings.rollout.rollout_engine
    if engine == "torch":
        return "the torch engine"
    if engine == "sglang":
        return explain_servers(settings.sglang, settings.num_engines)
    raise AssertionError(f"--rollout-engine {engine} has no explanation")
