"""The loss contract of a rehearsed layout: what losses are divided by, which ranks share tokens, and the loss mass."""

from __future__ import annotations

import textwrap
from typing import Any

from miles.commands.rehearsal.assumptions import response_length
from miles.config.explain import explain_layout
from miles.config.settings import Settings
from miles.objective.aggregation import MODES, StepDenominators, step_denominators
from miles.objective.canary import mass_is_known
from miles.objective.explain import objective_formula
from miles.types.dims import ParallelDims

WIDTH = 118


def contract_text(settings: Settings) -> list[str]:
    """Return the lines of the report."""
    lines = objective_formula(settings.loss, settings.step_shape, settings.added_losses).splitlines()
    mass = expected_mass(settings)
    if mass is not None:
        lines.append(
            f"divided by   {MODES[settings.loss.loss_aggregation].words}, of the whole step of N = "
            f"{settings.global_batch_size}, before it is split"
        )
    lines += explain_layout(settings)[1:]
    if mass is not None:
        lines.append(f"canary       the weights of all tokens must add up to {mass:g}")
    return [row for line in lines for row in textwrap.wrap(line, WIDTH, subsequent_indent=" " * 13)]


def contract_data(settings: Settings) -> dict[str, Any]:
    """Return the same as data. Denominators and mass are None if they are not known."""
    return {
        "aggregation": settings.loss.loss_aggregation,
        "trajectories": settings.global_batch_size,
        "denominators": _denominators(settings),
        "expected_mass": expected_mass(settings),
        "ranks": _ranks(settings.dims),
    }


def expected_mass(settings: Settings) -> float | None:
    """Return the loss mass of a step in which no token is masked (objective/canary.py); None if it is not known."""
    step = _of_step(settings)
    return None if step is None else step.expected_loss_mass


def _of_step(settings: Settings) -> StepDenominators | None:
    """Compute the denominators of a step as a run does, for responses of the assumed length; None if it has others."""
    if not mass_is_known(settings.loss):
        return None
    count, loss = settings.global_batch_size, settings.loss
    return step_denominators(
        loss.loss_aggregation,
        token_counts=[response_length(settings)] * count,
        trajectory_ids=range(count),
        group_indices=[i // settings.rollout.n_samples_per_prompt for i in range(count)],
        divisor=loss.loss_aggregation_divisor,
        alpha=loss.loss_aggregation_alpha,
    )


def _denominators(settings: Settings) -> dict[str, Any] | None:
    """Return the numbers: a token weighs 1 / (``trajectories`` times its sample's denominator), on whichever rank."""
    step = _of_step(settings)
    if step is None:
        return None
    return {
        "of_a_sample": MODES[settings.loss.loss_aggregation].denominator,
        "of_a_sample_without_masked_tokens": step.sample_denoms[0],
        "weight_of_a_token": 1 / (step.num_trajectories * step.sample_denoms[0]),
        "trajectories": step.num_trajectories,
        "prompts": -(-step.num_trajectories // settings.rollout.n_samples_per_prompt),
        "loss_tokens": step.num_loss_tokens,
    }


def _ranks(dims: ParallelDims) -> dict[str, Any]:
    """Return groups of ranks; every rank is in one group of each kind.

    Under dynamic context parallelism each micro-batch chooses the size of the groups that share its sequences.
    """
    shared = None if dims.dynamic_context_parallel else dims.context_groups(dims.context_parallel_size)
    return {
        "same_tokens_other_weights": dims.weight_groups,
        "share_each_sequence": shared,
        "context_parallel_sizes": dims.context_sizes,
        "same_weights_other_tokens": dims.token_groups,
    }
