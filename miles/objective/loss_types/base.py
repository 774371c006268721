"""Define an objective, and its loss type: the loss of the language model, and what the rest of a run depends on."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from miles.objective.distillation import distillation_formula, distillation_needs
from miles.objective.registry import Needs, ObjectivePart, Term
from miles.objective.value_loss import value_loss_formula

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miles.objective.estimators.base import Estimator, SampleRewards
    from miles.objective.output import LossOutput, PolicyScores
    from miles.objective.policy_losses.base import PolicyLoss
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.objective.token_weights import TokenWeight
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
        is_postprocessed = self.flags.rollout_data_postprocess_path is not None
        return (
            self.estimator.token_needs(self.flags)
            | distillation_needs(self.flags)
            | Needs(old_log_probs=is_postprocessed)
        )

    @property
    def selects_tokens(self) -> bool:
        """Whether the policy loss chooses tokens from the whole step before it."""
        return self.loss_type.uses_policy_loss and self.policy_loss.selects_tokens

    @property
    def ranks_entropies(self) -> bool:
        """Whether tokens are chosen from the whole step by their entropy before it."""
        return self.loss_type.uses_policy_loss and self.flags.top_entropy_quantile != 1

    @property
    def estimates_by_token(self) -> bool:
        """Whether a token has its own advantage, made by the trainer before the first step of an iteration."""
        return self.flags.use_opd or self.estimator.estimates_by_token(self.flags)

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are compared within their prompt group, so that a group of one has no advantage.

        With a teacher, its tokens still have one.
        """
        return not self.flags.use_opd and self.estimator.smallest_group(self.flags) > 1

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

    def language_model_loss(self, micro: MicroBatch, scores: PolicyScores) -> LossOutput:
        """Compute the loss of one micro-batch from a model's scores."""
        return self.loss_type.language_model_loss(self, micro, scores)


class LossType(ObjectivePart["LossArguments"]):
    """A loss type.

    Attributes:
        uses_advantages: Whether rewards become advantages. If not, rewards are not read, and samples need not have any.
        uses_policy_loss: Whether ``--policy-loss``, corrections, KL and entropy make up the loss.
        trains_policy: Whether the policy learns. If not, only the critic does.
        loss_mass_is_known: Whether the weights of all tokens add up to a number that is known when the batch is built.
        reads_any: Whether it is the user's, and may read any flag.
        lacks: The flags that ask for a part of the objective that it does not have. They are refused if they are set,
            with ``instead_of_lacking``.
    """

    flag: ClassVar[str] = "loss_type"
    uses_advantages: bool = True
    uses_policy_loss: bool = False
    trains_policy: bool = True
    loss_mass_is_known: bool = False
    reads_any: bool = False
    lacks: tuple[str, ...] = ()
    instead_of_lacking: str = "use --loss-type policy_loss"

    def needs_of(self, objective: Objective) -> Needs:
        """Return the trainer's scores: inputs of the estimator, and the reference for ``--use-kl-loss``."""
        flags = objective.flags
        return objective.estimator.needs(flags) | Needs(ref_log_probs=flags.use_kl_loss)

    @abstractmethod
    def terms(self, objective: Objective, shape: StepShape) -> list[Term]:
        """Return the lines of the formula that it computes, each with the module that computes it."""

    @abstractmethod
    def words(self, objective: Objective) -> str:
        """Name the quantity that a step minimizes, in a few words."""

    @abstractmethod
    def language_model_loss(self, objective: Objective, micro: MicroBatch, scores: PolicyScores) -> LossOutput:
        """Compute the loss of one micro-batch from a model's scores."""

    def idle_on_policy(self, objective: Objective) -> list[str]:
        """Say which flags have no effect if an iteration has one step, so that every ratio is 1."""
        return []

    def zero_advantage_has_gradient(self, flags: LossArguments) -> bool:
        """Return true unless the loss is known to vanish with the advantage."""
        return True


def advantage_terms(objective: Objective, shape: StepShape) -> list[Term]:
    """Return the formulas of A and of the critic's loss. The index t counts the loss tokens of a trajectory."""
    flags = objective.flags
    terms = value_loss_formula(flags, shape) if flags.has_critic else []
    terms += _estimate(objective, shape)
    terms += distillation_formula(flags)
    if flags.normalize_advantages:
        text = "A is whitened: (A - mean) / std over the loss tokens of the step"
        terms.append(Term(text, "miles.objective.token_advantages"))
    path = flags.rollout_data_postprocess_path
    if path is not None:
        terms.append(Term(f"A is then what {path}(...) makes of it", "miles.batch.convert", path))
    if flags.drop_zero_std_groups:
        text = "a step is without the groups whose A are all 0, and its counts too, unless it has no other groups"
        terms.append(Term(text, "miles.batch.convert"))
    return terms


def _estimate(objective: Objective, shape: StepShape) -> list[Term]:
    """Return the estimator's formula, or the replacement of its first phase."""
    estimator, term = objective.estimator, shape.users_advantages
    if term is None:
        return estimator.formula(objective.flags)
    if not estimator.by_token:
        return [replace(term, text=f"A = {term.text} instead of --advantage-estimator {estimator.name}")]
    rewards = replace(term, text=f"reward, or its difference from a mean, is what {term.text} says")
    return [*estimator.formula(objective.flags), rewards]
