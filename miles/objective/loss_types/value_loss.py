"""The critic's value loss alone; the policy stays unchanged. The loss is in ``miles/objective/value_loss.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.objective.aggregation import check_diagnostic_mode
from miles.objective.loss_types.base import LossType, Objective, advantage_terms
from miles.objective.registry import Term
from miles.objective.token_weights import SWITCHES

if TYPE_CHECKING:
    from miles.base.flags import Errors
    from miles.objective.output import LossOutput, PolicyScores
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


class ValueLoss(LossType):
    """Train the critic of ``--advantage-estimator ppo`` before the policy learns, or without it."""

    name = "value_loss"
    summary = "the critic's value loss alone, the policy stays"
    trains_policy = False
    lacks = (
        "policy_loss",
        "entropy_coef",
        "use_kl_loss",
        "custom_pg_loss_reducer_function_path",
        "pg_loss_divisor",
        "custom_policy_loss_function_path",
        "kl_target",
        "entropy_target",
        *SWITCHES,
    )

    def check(self, flags: LossArguments, shape: StepShape, errors: Errors) -> None:
        """Check that there is a critic, and that the mode of the aggregation is one of diagnostics."""
        if not flags.has_critic:
            rule = f"trains a critic, and --advantage-estimator {flags.advantage_estimator} has none"
            errors.refuse("loss_type", self.name, rule, "add --advantage-estimator ppo")
        check_diagnostic_mode(flags, "by --loss-type value_loss", errors)

    def terms(self, objective: Objective, shape: StepShape) -> list[Term]:
        """Return the value loss and what its returns are made of."""
        whole = Term("loss = value_loss of the critic; the policy stays unchanged", "miles.objective.value_loss")
        return [whole, *advantage_terms(objective, shape)]

    def words(self, objective: Objective) -> str:
        """Name the critic's loss."""
        return "the critic's clipped squared error"

    def language_model_loss(self, objective: Objective, micro: MicroBatch, scores: PolicyScores) -> LossOutput:
        """Raise ``ValueError``: the language model does not learn."""
        raise ValueError("--loss-type value_loss: not a loss of a language model")
