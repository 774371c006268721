"""The objective. docs/loss-aggregation.md says what every setting computes."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.arguments.flag import flag

Aggregation = Literal["sample_mean", "prompt_mean", "token_mean", "constant"]


@dataclass(frozen=True)
class LossArguments:
    """loss: advantages, policy loss, aggregation, KL and entropy."""

    loss_type: Literal["policy_loss", "sft_loss"] = flag("policy_loss", "policy gradient, or supervised fine-tuning")
    advantage_estimator: Literal["grpo"] = flag("grpo", "how rewards become advantages")
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
    use_kl_loss: bool = flag(
        False, "add the KL to the reference model to the loss (with coefficient 0: only measure it)"
    )
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss; needs --use-kl-loss")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", "estimator of the KL; low_var_kl is k3 clamped to [-10, 10]"
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus subtracted from the loss")
    log_probs_chunk_size: int = flag(1024, "response tokens whose logits stand in memory at a time; -1 is all")
