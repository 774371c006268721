"""The objective that a run uses: built once from its flags, with every part found by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from miles.flags import collect_errors
from miles.objective.canary import check_canary
from miles.objective.corrections import Correction, check_corrections, corrections_of
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import Estimator, SampleRewards
from miles.objective.hook_calls import CustomAdvantages, CustomPolicyLoss, custom_loss_function
from miles.objective.hooks import LOSS_FLAG, check_hook_flags, zero_advantage_has_gradient
from miles.objective.kl import check_kl
from miles.objective.output import LossOutput
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.policy_losses.base import PolicyLoss
from miles.objective.policy_objective import policy_loss_function
from miles.objective.registry import Needs
from miles.objective.sft import check_sft, sft_loss_function
from miles.objective.value_loss import check_value_loss

if TYPE_CHECKING:
    import torch

    from miles.flags import Errors
    from miles.objective.settings import LossArguments, StepShape
    from miles.train_batch import MicroBatch


@dataclass(frozen=True)
class Objective:
    """What a run computes, part by part. KL, entropy and aggregation are settings of ``flags``."""

    flags: LossArguments
    estimator: Estimator
    policy_loss: PolicyLoss
    corrections: tuple[Correction, ...]

    @property
    def needs(self) -> Needs:
        """What the trainer scores before the loss is computed."""
        if self.flags.loss_type == "sft_loss":
            return Needs()
        needs = self.estimator.needs(self.flags) | Needs(ref_log_probs=self.flags.use_kl_loss)
        return needs if self.flags.loss_type == "value_loss" else needs | self.policy_loss.needs(self.flags)

    def sample_advantages(self, samples: SampleRewards) -> list[float]:
        """Compute phase 1 of the advantages: one number per sample, from whole groups.

        Raises:
            ValueError: If a reward is NaN or infinite.
        """
        samples.check_finite()
        if self.flags.loss_type == "sft_loss":
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
            self._whole_loss_has_gradient
            or self.estimator.zero_advantage_has_gradient(flags)
            or self.policy_loss.zero_advantage_has_gradient(flags)
            or flags.kl_loss_coef != 0.0
            or flags.entropy_coef != 0.0
            or flags.custom_pg_loss_reducer_function_path is not None
        )

    @property
    def _whole_loss_has_gradient(self) -> bool:
        path = self.flags.custom_loss_function_path
        if self.flags.loss_type == "custom_loss" and path is not None:
            return zero_advantage_has_gradient(path, LOSS_FLAG)
        return self.flags.loss_type != "policy_loss"

    def language_model_loss(
        self,
        micro: MicroBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        canary: torch.Tensor | None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch from a model's ``log_probs`` and ``entropy``, [R]."""
        if self.flags.loss_type == "policy_loss":
            return policy_loss_function(self, micro, log_probs, entropy, canary)
        if self.flags.loss_type == "sft_loss":
            return sft_loss_function(self.flags, micro, log_probs, canary)
        if self.flags.loss_type == "custom_loss":
            assert entropy is not None, "a custom loss is given the entropy"
            return custom_loss_function(self.flags, micro, log_probs, entropy, canary)
        raise ValueError(f"--loss-type {self.flags.loss_type}: not a loss of a language model")


@lru_cache
def build_objective(loss: LossArguments) -> Objective:
    """Build the objective of a run.

    Raises:
        ValueError: A part has a name that no file has, or a flag is set that the chosen parts do not read, such as
            ``--kl-coef`` with an estimator without a KL: it would change nothing.
    """
    objective = find_objective(loss)
    with collect_errors() as errors:
        if loss.loss_type == "sft_loss":
            check_sft(loss, errors)
        else:
            _check_read(objective, errors)
    return objective


@lru_cache
def find_objective(loss: LossArguments) -> Objective:
    """Find the parts that ``loss`` names, for checks of flags. Raises ``ValueError`` for a name that no file has."""
    estimator = ESTIMATORS[loss.advantage_estimator]
    if loss.custom_advantage_function_path is not None:
        estimator = CustomAdvantages(loss.custom_advantage_function_path, estimator)
    policy_loss = POLICY_LOSSES[loss.policy_loss or estimator.default_policy_loss]
    if loss.custom_policy_loss_function_path is not None:
        policy_loss = CustomPolicyLoss(loss.custom_policy_loss_function_path)
    return Objective(loss, estimator, policy_loss, corrections_of(loss))


def check_objective(loss: LossArguments, shape: StepShape, errors: Errors) -> None:
    """Report every rule of the objective that ``loss`` breaks, the aggregation apart (``reconcile_aggregation``).

    Args:
        loss: The flags, as they were given.
        shape: The step.
        errors: Collects them.
    """
    check_chunk_size(loss, errors)
    objective = find_objective(loss)
    objective.policy_loss.check(loss, shape, errors)
    check_kl(loss, errors)
    check_corrections(loss, errors)
    check_canary(loss, errors)
    errors.finite(loss, "entropy_coef")
    if loss.loss_type == "sft_loss":
        check_sft(loss, errors)
        return
    objective.estimator.check(loss, shape, errors)
    _check_group(objective, shape, errors)
    _check_read(objective, errors)
    check_hook_flags(loss, errors)
    check_value_loss(loss, errors)


def _check_read(objective: Objective, errors: Errors) -> None:
    """Report flags that other parts read, and the chosen ones do not."""
    flags = objective.flags
    ESTIMATORS.check_read(objective.estimator, flags, errors)
    if flags.custom_policy_loss_function_path is None:  # a custom one may read any of them
        POLICY_LOSSES.check_read(objective.policy_loss, flags, errors)


def check_chunk_size(loss: LossArguments, errors: Errors) -> None:
    """Report a ``--log-probs-chunk-size`` that is no number of tokens (token_log_probs.py)."""
    size = loss.log_probs_chunk_size
    if size != -1 and size < 1:
        errors.refuse("log_probs_chunk_size", size, "must be -1 (all tokens) or at least 1", "1024 is usual")


def _check_group(objective: Objective, shape: StepShape, errors: Errors) -> None:
    smallest, name = objective.estimator.smallest_group(objective.flags), objective.estimator.name
    if 1 <= shape.samples_per_prompt < smallest:
        rule = f"with --advantage-estimator {name} every advantage is 0: it compares {smallest} or more of a group"
        way_out = f"give {smallest} or more (8 is usual), or use an estimator that does not compare"
        errors.refuse("n_samples_per_prompt", shape.samples_per_prompt, rule, way_out)
