"""The objective that a run uses: built once from its flags, with every part found by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from miles.base.flags import changed
from miles.objective.adaptive import check_adaptive_entropy
from miles.objective.distillation import check_distillation, distillation_needs
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import Estimator, SampleRewards
from miles.objective.hooks import CustomAdvantages, CustomPolicyLoss
from miles.objective.kl import check_kl
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.loss_types.base import LossType
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.policy_losses.base import PolicyLoss
from miles.objective.registry import Needs
from miles.objective.token_weights import TokenWeight, check_token_weights, token_weights_of

if TYPE_CHECKING:
    import torch

    from miles.base.flags import Errors
    from miles.objective.output import LossOutput
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


@dataclass(frozen=True)
class Objective:
    """Hold the parts of a run's objective. KL, entropy and aggregation are settings of ``flags``.

    ``args`` has all flags of the run by their names, for functions of the user's that read them.
    """

    flags: LossArguments
    loss_type: LossType
    estimator: Estimator[Any]
    policy_loss: PolicyLoss[Any]
    token_weights: tuple[TokenWeight, ...]
    args: Any = field(default=None, compare=False)

    @property
    def needs(self) -> Needs:
        """The quantities that the trainer scores before the loss is computed."""
        return self.loss_type.needs_of(self)

    @property
    def advantages_need(self) -> Needs:
        """The trainer's scores before it makes advantages of tokens, and shows them to the user's function."""
        is_shown = self.flags.rollout_data_postprocess_path is not None
        return self.estimator.token_needs(self.flags) | distillation_needs(self.flags) | Needs(old_log_probs=is_shown)

    @property
    def selects_tokens(self) -> bool:
        """Whether the policy loss chooses tokens from the whole step before it."""
        return self.loss_type.uses_policy_loss and self.policy_loss.selects_tokens

    @property
    def ranks_entropies(self) -> bool:
        """Whether tokens are chosen from the whole step by their entropy before it."""
        return self.loss_type.uses_policy_loss and self.flags.top_entropy_quantile != 1

    def sample_advantages(self, samples: SampleRewards) -> list[float]:
        """Compute phase 1 of the advantages: one number per sample, from whole groups.

        Raises:
            ValueError: If a reward is NaN or infinite.
        """
        samples.check_finite()
        if not self.loss_type.uses_advantages:
            return list(samples.rewards)
        return self.estimator.sample_advantages(self.flags, samples)

    def samples_with_gradient(self, advantages: Sequence[float]) -> list[bool]:
        """Return which samples' losses can have a gradient, given what phase 1 made of their rewards.

        A sample of advantage 0 has none, unless a part of the objective may give it one. Groups whose samples were all
        right or all wrong are such samples.
        """
        zero_too = self.zero_advantage_has_gradient
        return [advantage != 0.0 or zero_too for advantage in advantages]

    @property
    def zero_advantage_has_gradient(self) -> bool:
        """Whether a part of the objective may give a sample of advantage 0 a gradient. Every part is asked."""
        flags = self.flags
        return (
            self.loss_type.zero_advantage_has_gradient(flags)
            or self.estimator.zero_advantage_has_gradient(flags)
            or self.policy_loss.zero_advantage_has_gradient(flags)
            or flags.kl_loss_coef != 0.0
            or flags.entropy_coef != 0.0
            or flags.entropy_target is not None
            or flags.use_opd
            or flags.custom_pg_loss_reducer_function_path is not None
            or flags.rollout_data_postprocess_path is not None
        )

    def language_model_loss(
        self,
        micro: MicroBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        canary: torch.Tensor | None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch from a model's ``log_probs`` and ``entropy``, [R]."""
        return self.loss_type.language_model_loss(self, micro, log_probs, entropy, canary)


@lru_cache
def build_objective(loss: LossArguments) -> Objective:
    """Find the parts that ``loss`` names. Raises ``ValueError`` for a name that no file has."""
    estimator = ESTIMATORS[loss.advantage_estimator]
    if loss.custom_advantage_function_path is not None:
        estimator = CustomAdvantages(loss.custom_advantage_function_path, estimator)
    policy_loss = POLICY_LOSSES[loss.policy_loss or estimator.default_policy_loss]
    if loss.custom_policy_loss_function_path is not None:
        policy_loss = CustomPolicyLoss(loss.custom_policy_loss_function_path)
    return Objective(loss, LOSS_TYPES[loss.loss_type], estimator, policy_loss, token_weights_of(loss))


def check_objective(loss: LossArguments, shape: StepShape, errors: Errors) -> None:
    """Report every rule of the objective that ``loss`` breaks, the aggregation apart (``reconcile_aggregation``).

    Args:
        loss: The flags, as they were given.
        shape: The step.
        errors: Collects them.
    """
    check_chunk_size(loss, errors)
    objective = build_objective(loss)
    objective.policy_loss.check(loss, shape, errors)
    check_kl(loss, errors)
    check_distillation(loss, errors)
    check_token_weights(loss, errors)
    check_adaptive_entropy(loss, errors)
    if objective.loss_type.uses_advantages:
        objective.estimator.check(loss, shape, errors)
    objective.loss_type.check(loss, shape, errors)
    _check_contradictions(objective, errors)


def _check_contradictions(objective: Objective, errors: Errors) -> None:
    """Report flags that ask for a part of the objective that this one does not have."""
    flags, loss_type = objective.flags, objective.loss_type
    for name in changed(flags, [*LOSS_TYPES.reads, *loss_type.lacks]):
        if name not in loss_type.reads:
            readers = LOSS_TYPES.readers(name)
            what_to_do = f"use --loss-type {' or '.join(readers)}" if readers else loss_type.instead_of_lacking
            errors.refuse(
                name, getattr(flags, name), f"is no part of --loss-type {loss_type.name}", f"{what_to_do}, or drop it"
            )
    if loss_type.uses_advantages:
        ESTIMATORS.check_instead(objective.estimator, flags, errors)
    if loss_type.uses_policy_loss and flags.policy_loss is not None and flags.custom_policy_loss_function_path:
        rule = "names a second policy loss, alongside --custom-policy-loss-function-path"
        errors.refuse("policy_loss", flags.policy_loss, rule, "keep one of the two")


def check_chunk_size(loss: LossArguments, errors: Errors) -> None:
    """Report a ``--log-probs-chunk-size`` that is no number of tokens (token_log_probs.py)."""
    size = loss.log_probs_chunk_size
    if size != -1 and size < 1:
        errors.refuse("log_probs_chunk_size", size, "must be -1 (all tokens) or at least 1", "1024 is usual")
