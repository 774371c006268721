"""The loss-mass canary: check with one number that every token got the weight that the objective gives it.

A scalar of value 0 is added to every per-token policy loss. Its gradient, after all reductions of the backend, is the
sum of all token weights of the step. That sum is known when the batch is built: 1 for the three means, T / (L N) for
``constant``, minus the share of fully masked trajectories or prompts. A denominator taken over a part of the step, an
average instead of a sum, a token on two ranks or on none: each changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, assert_never

from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import TrainBatch, TrainShard

TOLERANCE = 1e-4  # relative; the sum is in fp32 throughout, over up to some million tokens


class LossMassError(ValueError):
    """The weights of a step's tokens do not add up to the sum that the objective states."""


def mass_is_known(loss: LossArguments) -> bool:
    """Return whether the sum of the token weights of a step is known."""
    return loss.type.loss_mass_is_known and loss.custom_pg_loss_reducer_function_path is None


class CanarySchedule:
    """Choose the steps that measure the mass: ``--loss-canary``. The rollout side asks once per step, in order.

    Never under a custom reducer or a custom loss: the sum of their weights is not known beforehand. The critic's loss
    is not watched.
    """

    def __init__(self, loss: LossArguments) -> None:
        known = mass_is_known(loss)
        match loss.loss_canary:
            case "off":
                self._due, self._always = False, False
            case "first-step":
                self._due, self._always = known, False
            case "always":
                self._due, self._always = known, known
            case unknown:
                assert_never(unknown)

    def is_due(self, batch: TrainBatch) -> bool:
        """Return true for every step, or until the first that has a loss token."""
        due = self._due
        self._due = due and (self._always or batch.expected_loss_mass == 0)
        return due


def check_loss_mass(shard: TrainShard, metrics: Mapping[str, Metric], ranks: int) -> None:
    """Compare ``loss_mass`` with the mass that the shard expects, if it expects one; every rank finds the same.

    ``ranks`` hold the step, data and context parallel together. Raises ``LossMassError``.
    """
    expected = shard.expected_loss_mass
    if expected is None:
        return
    mass = metrics["loss_mass"].value
    if abs(mass - expected) <= TOLERANCE * max(abs(expected), 1e-3):
        return
    ratio = mass / expected if expected else float("nan")
    cause = _likely_cause(ratio, ranks, [plan.context_parallel_size for plan in shard.micro_batches])
    raise LossMassError(
        f"--loss-canary: the weights of this step's tokens add up to {mass:.6g}, and the objective says "
        f"{expected:.6g}; likely cause: {cause}. The weights of the model were left as they were; "
        "--loss-canary off trains anyway, on another objective than the one asked for"
    )


def _likely_cause(ratio: float, ranks: int, context_sizes: Sequence[int]) -> str:
    """Return the likely cause of a mass that is ``ratio`` of the expected one.

    ``ranks`` hold the step, and ``context_sizes`` share each micro-batch of a rank: their numbers are suspects.
    """
    sharing = ((size, "ranks that share a sequence (context parallelism)") for size in sorted(set(context_sizes)))
    suspects = [(ranks, "ranks"), *sharing, (len(context_sizes), "micro-batches")]
    for factor, what in suspects:
        if factor < 2:
            continue
        if abs(ratio * factor - 1) < 1e-3:
            return f"gradients are averaged over the {factor} {what} instead of added up"
        if abs(ratio / factor - 1) < 1e-3:
            return f"the loss is counted once for each of the {factor} {what}"
    if abs(ratio) < 1e-6:
        return "no token's loss reaches the gradient"
    return (
        "a denominator was computed over a part of the step, or tokens were lost or doubled between the conversion "
        "and the loss (a custom converter, another mask, a cut sequence)"
    )
