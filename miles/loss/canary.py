"""The loss-mass canary: one number that shows whether every token got the weight that the objective gives it.

A scalar worth 0 is added to every per-token policy loss. Its gradient, after all reductions of the backend, is the sum
of all token weights of the step. That sum is known when the batch is built: 1 for the three means, T / (L N) for
``constant``, less what fully masked rollouts or prompts would weigh. A denominator taken over a part of the step, an
average where a sum belongs, a token that stands on two ranks or on none: each changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles.arguments.loss import LossArguments
from miles.tracking.metrics import Metric
from miles.train_batch import TrainBatch, TrainShard

TOLERANCE = 1e-4  # relative; the sum is in fp32 throughout, over up to some million tokens


class LossMassError(ValueError):
    """The weights of a step's tokens do not add up to what the objective says."""


def expected_loss_mass(batch: TrainBatch, trained: Sequence[int]) -> float:
    """The weights of the tokens of the samples ``trained``, out of a whole step.

    What the others weigh is taken off the step's own mass, so that a wrong denominator shows whoever is trained.
    """
    left_out = set(range(len(batch))) - set(trained)
    return batch.expected_loss_mass - sum(
        float(batch.loss_masks[i].sum()) / (batch.num_rollouts * batch.sample_denoms[i]) for i in left_out
    )


class LossMassWatch:
    """Checks ``train/loss_mass`` in the first step that has tokens, or in every step: ``--loss-canary``.

    Under a custom reducer it is reported and not checked: what the tokens should weigh is then the user's to say.
    """

    def __init__(self, loss: LossArguments, ranks: int) -> None:
        """``ranks`` hold a step, data and context parallel together."""
        self.ranks = ranks
        self._always = loss.loss_canary == "always"
        self._due = loss.loss_canary != "off" and loss.custom_pg_loss_reducer_function_path is None

    def check(self, shard: TrainShard, metrics: Mapping[str, Metric]) -> None:
        """Raises ``LossMassError`` if the step's mass is wrong; every rank finds the same."""
        if not self._due:
            return
        sizes = [plan.context_parallel_size for plan in shard.micro_batches]
        found = metrics["loss_mass"].value
        check_loss_mass(found, shard.expected_loss_mass, self.ranks, sizes, len(shard.micro_batches))
        self._due = self._always or shard.expected_loss_mass == 0


def check_loss_mass(
    found: float, expected: float, ranks: int, context_sizes: Sequence[int], micro_batches: int
) -> None:
    """Raises ``LossMassError`` with both numbers and the likely cause, if ``found`` is not ``expected``.

    ``ranks`` hold the step, cut by ``context_sizes``, in ``micro_batches`` a rank: suspects for a factor.
    """
    if abs(found - expected) <= TOLERANCE * max(abs(expected), 1e-3):
        return
    cause = _likely_cause(found / expected if expected else float("nan"), ranks, context_sizes, micro_batches)
    raise LossMassError(
        f"--loss-canary: the weights of this step's tokens add up to {found:.6g}, and the objective says "
        f"{expected:.6g}; likely cause: {cause}. The weights of the model were left as they were; "
        "--loss-canary off trains all the same, on another objective than the one asked for"
    )


def _likely_cause(ratio: float, ranks: int, context_sizes: Sequence[int], micro_batches: int) -> str:
    suspects = [
        (size, "ranks that share a sequence (context parallelism)") for size in sorted(set(context_sizes)) if size > 1
    ]
    suspects = [(ranks, "ranks"), *suspects, (micro_batches, "micro-batches")]
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
