"""Declare the flags of the objective. docs/loss-aggregation.md states what every setting computes.

Flags that one estimator or one policy loss owns are declared in its file; ``LossArguments`` has them all.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional

from miles.base.flags import flag
from miles.objective.adaptive import AdaptiveEntropyFlags, AdaptiveKlFlags
from miles.objective.aggregation import AggregationFlags
from miles.objective.distillation import DistillationFlags
from miles.objective.estimators import ESTIMATORS
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.loss_types.base import LossType
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.token_weights import ImportanceLevel

_of_tis = partial(flag, needs="--use-tis")
_of_rs = partial(flag, needs="--use-rs")


@dataclass(frozen=True)
class TokenWeightFlags:
    """loss: what multiplies the loss of a token, and whose probabilities its ratios are made of."""

    use_rollout_logprobs: bool = flag(
        False,
        "p_old of every ratio is what the engine reported when it sampled; the trainer does not score it",
        needs="a ratio",
    )
    use_opsm: bool = flag(
        False, "drop sequences of negative advantage whose KL from the old policy exceeds --opsm-delta"
    )
    opsm_delta: float = flag(
        1e-4, "mean KL per token above which --use-opsm drops a sequence", at_least=0, needs="--use-opsm"
    )
    use_tis: bool = flag(False, "weight token losses by the ratio of trainer to engine probability, bounded")
    tis_clip: float = _of_tis(2.0, "upper bound of the weight of --use-tis", above=0)
    tis_clip_low: float = _of_tis(0.0, "lower bound of the weight of --use-tis", at_least=0)
    tis_mode: Literal["truncate", "icepop"] = _of_tis(
        "truncate", "outside its bounds a ratio is cut to them, or set to 0"
    )
    tis_level: ImportanceLevel = _of_tis("token", "ratio of a token, of a sequence (product), or its geometric mean")
    tis_batch_normalize: bool = flag(
        False,
        "divide the weights of --use-tis by their mean over the whole step, which is then 1",
        needs="--use-tis, no --custom-tis-function-path",
    )
    use_rs: bool = flag(
        False, "drop what is outside --rs-lower-bound and --rs-upper-bound (masked importance sampling)"
    )
    rs_lower_bound: float = _of_rs(0.5, "lower bound of the ratio", at_least=0)
    rs_upper_bound: float = _of_rs(2.0, "upper bound of the ratio", above=0)
    rs_level: ImportanceLevel = _of_rs("token", "what --use-rs drops: tokens, or sequences")
    rs_veto_threshold: Optional[float] = _of_rs(
        None, "--use-rs also drops each sequence that has a token whose ratio is below this, such as 1e-4", above=0
    )
    top_entropy_quantile: float = flag(
        1.0,
        "fraction of the step's tokens, by the largest entropy, whose policy loss counts; 1 is all",
        within="(0, 1]",
    )
    custom_tis_function_path: Optional[str] = _of_tis(
        None, "your weights of token losses, module:function or module.function"
    )
    get_mismatch_metrics: bool = flag(
        False, "log how far the trainer's log-probs are from the engine's (KL, chi2, ...)", needs="a policy loss"
    )


@dataclass(frozen=True)
class CommonFlags:
    """loss: the flags that belong to no single estimator or policy loss."""

    loss_type: str = flag("policy_loss", f"what is trained. {LOSS_TYPES.help}", choices=tuple(LOSS_TYPES))
    advantage_estimator: str = flag(
        "grpo", f"how rewards become advantages. {ESTIMATORS.help}", choices=tuple(ESTIMATORS)
    )
    policy_loss: Optional[str] = flag(
        None, f"the loss of a token; default: the estimator's own. {POLICY_LOSSES.help}", choices=tuple(POLICY_LOSSES)
    )
    drop_zero_std_groups: bool = flag(
        False,
        "leave groups whose advantages are all 0, as with equal rewards, out of the step and its denominators, and do "
        "not replace them (ScaleRL's zero-variance filtering)",
        needs="advantages, compared groups",
    )
    value_clip: float = flag(
        0.2, "how far the value loss follows the critic from its values at the iteration's start", above=0
    )
    custom_advantage_function_path: Optional[str] = flag(
        None, "your advantages, of samples or of tokens (docs/objective-hooks.md), module:function or module.function"
    )
    custom_policy_loss_function_path: Optional[str] = flag(
        None, "your token losses, instead of --policy-loss, module:function or module.function"
    )
    custom_loss_function_path: Optional[str] = flag(
        None, "your whole loss, with --loss-type custom_loss, module:function or module.function"
    )
    rollout_data_postprocess_path: Optional[str] = flag(
        None,
        "your function of what an iteration trains on, scored and with advantages, module:function or module.function",
    )
    loss_canary: Literal["first-step", "always", "off"] = flag(
        "first-step",
        "check that the weights of all tokens add up to what the objective states, and stop if not",
        needs="weights that are known",
    )
    log_probs_chunk_size: int = flag(1024, "response tokens whose logits are in memory at once; -1 is all")


# The order of the bases puts the common flags first.
_OWN_FLAGS = (
    *reversed(POLICY_LOSSES.own_flags),
    *reversed(ESTIMATORS.own_flags),
    AdaptiveEntropyFlags,
    AdaptiveKlFlags,
)


@dataclass(frozen=True)
class LossArguments(*_OWN_FLAGS, DistillationFlags, AggregationFlags, TokenWeightFlags, CommonFlags):  # type: ignore[misc]
    """loss: advantages, policy loss, aggregation, KL and entropy."""

    @property
    def type(self) -> LossType:
        """The object that ``loss_type`` names."""
        return LOSS_TYPES[self.loss_type]

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return ESTIMATORS[self.advantage_estimator].needs(self).values

    @property
    def reads_greedy_baseline(self) -> bool:
        """Whether a greedy response to each prompt is generated and scored, for the estimator."""
        return self.type.uses_advantages and ESTIMATORS[self.advantage_estimator].greedy_baseline
