"""The objective. docs/loss-aggregation.md says what every setting computes."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag

Aggregation = Literal["sample_mean", "prompt_mean", "token_mean", "constant"]
ImportanceLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class LossArguments:
    """loss: advantages, policy loss, aggregation, KL and entropy."""

    loss_type: Literal["policy_loss", "value_loss", "sft_loss"] = flag(
        "policy_loss", "policy gradient; the critic's value loss alone, the policy stays; or supervised fine-tuning"
    )
    advantage_estimator: Literal["grpo", "gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = flag(
        "grpo",
        "how rewards become advantages; gspo is grpo with the ratio of whole sequences, ppo trains a critic beside the "
        "policy (GAE), reinforce_plus_plus is the discounted return, its baseline variant subtracts the group's mean",
    )
    gamma: float = flag(1.0, "discount of what comes one response token later; for ppo and reinforce_plus_plus")
    lambd: float = flag(1.0, "lambda of GAE (ppo): 1 trusts the reward alone, 0 the critic's next value")
    value_clip: float = flag(0.2, "how far the value loss follows the critic from its values at the rollout's start")
    normalize_advantages: bool = flag(False, "whiten the advantages over the response tokens of the step")
    kl_coef: float = flag(
        0.0, "weight of the KL to the reference model in each token's reward; excludes --kl-loss-coef"
    )
    disable_grpo_std_normalization: bool = flag(False, "subtract the group's mean only, as Dr.GRPO does")
    disable_rewards_normalization: bool = flag(False, "use the rewards as they are as advantages")
    loss_aggregation: Aggregation = flag("sample_mean", "how per-token losses become the loss of the step")
    loss_aggregation_divisor: Optional[float] = flag(
        None, "L of --loss-aggregation constant: 1/(L N) sum of token losses"
    )
    calculate_per_token_loss: bool = flag(False, "divide by the step's token count; an older name of token_mean")
    pg_loss_divisor: Optional[float] = flag(None, "earlier name: --loss-aggregation constant with this divisor")
    loss_agg_mode: Optional[
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum"]
    ] = flag(
        None,
        "verl's name of the aggregation",
        choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "seq-mean-token-sum"),
        type=str,
    )
    loss_scale_factor: Optional[float] = flag(None, "the divisor where --loss-agg-mode has one")
    custom_pg_loss_reducer_function_path: Optional[str] = flag(
        None,
        "your reducer of the policy loss, module:function or module.function; takes precedence over the aggregation",
    )
    eps_clip: float = flag(0.2, "lower PPO ratio clip: 1 - eps")
    eps_clip_high: Optional[float] = flag(None, "upper PPO ratio clip: 1 + eps; default --eps-clip")
    eps_clip_c: Optional[float] = flag(None, "dual-clip bound for negative advantages, above 1")
    use_opsm: bool = flag(
        False, "drop sequences of negative advantage whose KL from the old policy exceeds --opsm-delta"
    )
    opsm_delta: float = flag(1e-4, "mean KL a token above which --use-opsm drops a sequence")
    use_tis: bool = flag(False, "weight token losses by the ratio of trainer to engine probability, bounded")
    tis_clip: float = flag(2.0, "upper bound of the weight of --use-tis")
    tis_clip_low: float = flag(0.0, "lower bound of the weight of --use-tis")
    tis_mode: Literal["truncate", "icepop"] = flag("truncate", "outside its bounds a ratio is cut to them, or worth 0")
    tis_level: ImportanceLevel = flag("token", "ratio of a token, of a sequence (product), or its geometric mean")
    use_rs: bool = flag(
        False, "drop what lies outside --rs-lower-bound and --rs-upper-bound (masked importance sampling)"
    )
    rs_lower_bound: float = flag(0.5, "lower bound of the ratio with --use-rs")
    rs_upper_bound: float = flag(2.0, "upper bound of the ratio with --use-rs")
    rs_level: ImportanceLevel = flag("token", "what --use-rs judges and drops: tokens, or sequences")
    get_mismatch_metrics: bool = flag(
        False, "log how far the trainer's log-probs are from the engine's (KL, chi2, ...)"
    )
    loss_canary: Literal["first-step", "always", "off"] = flag(
        "first-step", "check that the weights of all tokens add up to what the objective says, and stop if not"
    )
    use_kl_loss: bool = flag(
        False, "add the KL to the reference model to the loss (with coefficient 0: only measure it)"
    )
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss; needs --use-kl-loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "estimator of the KL, in the loss or the reward; low_var_kl is k3 clamped to [-10, 10]"
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus subtracted from the loss")
    log_probs_chunk_size: int = flag(1024, "response tokens whose logits stand in memory at a time; -1 is all")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage_estimator == "ppo"

    @property
    def estimates_by_token(self) -> bool:
        """Whether a token has an advantage of its own, made by the trainer before the first step of a rollout."""
        return self.advantage_estimator not in ("grpo", "gspo") or self.normalize_advantages

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are compared within their prompt group, on the rollout side."""
        whole = ("ppo", "reinforce_plus_plus")
        return not self.disable_rewards_normalization and self.advantage_estimator not in whole

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference model are read."""
        return self.use_kl_loss or self.kl_coef != 0
