"""The objective of a step, as a formula with this run's numbers and in words. For --explain and the run report."""

from __future__ import annotations

from miles.arguments.settings import Settings
from miles.objective.settings import Aggregation, ImportanceLevel, LossArguments

_FORMULAS: dict[Aggregation, str] = {
    "sample_mean": "1/N Σ_r 1/M_r Σ_(i in r, t) m_it l_it",
    "prompt_mean": "1/P Σ_g 1/M_g Σ_(i in g, t) m_it l_it",
    "token_mean": "1/T Σ_(i, t) m_it l_it",
    "constant": "1/(L N) Σ_(i, t) m_it l_it",
}
_WORDS: dict[Aggregation, str] = {
    "sample_mean": "averaged over the tokens of each rollout, then over rollouts: every rollout weighs the same",
    "prompt_mean": "averaged over the tokens of each prompt's group, then over prompts: every prompt weighs the same",
    "token_mean": "averaged over all tokens of the step: every token weighs the same, so long answers weigh more",
    "constant": "summed over tokens and divided by a constant: a token's weight does not depend on any length",
}
_SYMBOLS: dict[Aggregation, str] = {
    "sample_mean": "M_r = masked tokens of rollout r",
    "prompt_mean": "M_g = masked tokens of prompt group g",
    "token_mean": "T = masked tokens of the step",
    "constant": "L = {divisor:g}",
}


def objective_formula(settings: Settings) -> str:
    """The loss of one optimizer step with its numbers, some lines. ``settings`` are those that validate() returns."""
    loss = settings.loss
    if loss.loss_type == "sft_loss":
        return "\n".join([*_aggregated("loss", settings), "l_it = -log p(token t of sample i)"])
    critic = [*_value_loss(settings), *_estimates(loss)] if loss.has_critic else _estimates(loss)
    if loss.loss_type == "value_loss":
        return "\n".join(["loss = value_loss of the critic; the policy stays as it is", *critic])
    terms = ["pg_loss"]
    if loss.use_kl_loss and loss.kl_loss_coef:
        terms.append(f"+ {loss.kl_loss_coef:g} KL_{loss.kl_loss_type}(policy, reference)")
    if loss.entropy_coef:
        sign = "-" if loss.entropy_coef > 0 else "+"
        terms.append(f"{sign} {abs(loss.entropy_coef):g} entropy")
    lines = ["loss = " + " ".join(terms), *_aggregated("pg_loss", settings), *_token_loss(loss)]
    return "\n".join([*lines, *critic])


def _aggregated(name: str, settings: Settings) -> list[str]:
    loss, rollouts = settings.loss, settings.global_batch_size
    if loss.custom_pg_loss_reducer_function_path is not None:
        return [f"{name} = {loss.custom_pg_loss_reducer_function_path}(m, l)", f"N = {rollouts} rollouts a step"]
    mode = loss.loss_aggregation
    counts = [f"N = {rollouts} rollouts a step"]
    if mode == "prompt_mean":
        counts.append(f"P = {rollouts // settings.rollout.n_samples_per_prompt} prompts a step")
    counts.append(_SYMBOLS[mode].format(divisor=loss.loss_aggregation_divisor or 0.0))
    return [f"{name} = {_FORMULAS[mode]}", ", ".join(counts)]


def _token_loss(loss: LossArguments) -> list[str]:
    low, high = clip_bounds(loss)
    corrections = _corrections(loss)
    weight = "w " if corrections else ""
    ratio = "exp(log p - log p_old)"
    if loss.advantage_estimator == "gspo":
        ratio = f"{ratio} in its geometric mean over the sequence"
    lines = [f"l_it = {weight}max(-ρ A, -clip(ρ, {low:g}, {high:g}) A), ρ = {ratio}"]
    if loss.eps_clip_c is not None:
        lines.append(f"       at most -{loss.eps_clip_c:g} A where A < 0 (dual clip)")
    return [*lines, *corrections]


def _corrections(loss: LossArguments) -> list[str]:
    """What multiplies a token's loss. The denominators are those of the original masks all the same."""
    lines = []
    if loss.use_tis:
        low, high = loss.tis_clip_low, loss.tis_clip
        bounded = (
            f"clip(r, {low:g}, {high:g})" if loss.tis_mode == "truncate" else f"r, or 0 outside [{low:g}, {high:g}]"
        )
        lines.append(f"w = {bounded}, r = p_old / p_engine of the {_level(loss.tis_level)}")
    if loss.use_rs:
        bounds = f"[{loss.rs_lower_bound:g}, {loss.rs_upper_bound:g}]"
        lines.append(f"w = 0 where p_old / p_engine of the {_level(loss.rs_level)} lies outside {bounds}")
    if loss.use_opsm:
        lines.append(f"w = 0 in sequences with A < 0 and a mean of log p_old - log p above {loss.opsm_delta:g}")
    return lines


def _level(level: ImportanceLevel) -> str:
    return {"token": "token", "sequence": "sequence (product)", "geometric": "sequence (geometric mean)"}[level]


def _value_loss(settings: Settings) -> list[str]:
    """What the critic minimizes. The mean is the default one, whatever the aggregation of pg_loss."""
    loss = settings.loss
    mode: Aggregation = "token_mean" if loss.loss_aggregation == "token_mean" else "sample_mean"
    clip = f"clip(V, V_old ± {loss.value_clip:g})"
    lines = [
        f"value_loss = {_FORMULAS[mode].replace('l_it', 'v_it')}, N = {settings.global_batch_size}, {_SYMBOLS[mode]}",
        f"v_it = max((V - G)², ({clip} - G)²), G = A + V_old before any whitening",
    ]
    alone = settings.critic.num_critic_only_steps
    if alone:
        lines.append(f"the first {alone} rollouts train the critic alone")
    return lines


def _estimates(loss: LossArguments) -> list[str]:
    """What A is. The t of an estimator count the unmasked tokens of a rollout, the last being T."""
    name = loss.advantage_estimator
    penalty = f" - {loss.kl_coef:g} KL_{loss.kl_loss_type}(p_old, reference)" if loss.kl_coef else ""
    lines = {
        "ppo": [
            f"A_t = Σ_k ({loss.gamma:g} · {loss.lambd:g})^k δ_(t+k), "
            f"δ_t = r_t + {loss.gamma:g} V_(t+1) - V_t with V = V_old",
            f"r_t = [t = T] reward{penalty}",
        ],
        "reinforce_plus_plus": [f"A_t = Σ_k {loss.gamma:g}^k r_(t+k), r_t = [t = T] reward{penalty}"],
        "reinforce_plus_plus_baseline": [f"A_t = reward - mean of its prompt group{penalty}"],
    }.get(name) or [_of_group(loss)]
    if loss.normalize_advantages and loss.loss_type != "value_loss":
        lines.append("A is whitened: (A - mean) / std over the unmasked tokens of the step")
    return lines


def _of_group(loss: LossArguments) -> str:
    if loss.disable_rewards_normalization:
        return "A = reward"
    if loss.disable_grpo_std_normalization:
        return "A = reward - mean of its prompt group"
    return "A = (reward - mean of its prompt group) / std of its prompt group"


def clip_bounds(loss: LossArguments) -> tuple[float, float]:
    """Between what ratios the policy loss is not clipped."""
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    return 1 - loss.eps_clip, 1 + high


def objective_in_words(settings: Settings) -> str:
    """The same, in sentences a newcomer can read."""
    loss = settings.loss
    what = {"policy_loss": "the clipped policy-gradient loss", "value_loss": "the critic's clipped squared error"}.get(
        loss.loss_type, "the negative log-likelihood"
    )
    if loss.custom_pg_loss_reducer_function_path is not None:
        how = f"reduced by your function {loss.custom_pg_loss_reducer_function_path}"
    else:
        how = _WORDS[loss.loss_aggregation]
    sentences = [f"Each step of {settings.global_batch_size} rollouts minimizes {what}, {how}."]
    if loss.has_critic and loss.loss_type == "policy_loss":
        sentences.append("A critic learns the return of every token beside it.")
    if loss.kl_coef:
        sentences.append(
            f"The KL to the reference model is taken off each token's reward, weighted by {loss.kl_coef:g}."
        )
    if loss.use_kl_loss:
        sentences.append(
            f"The KL to the reference model ({loss.kl_loss_type}) is added, weighted by {loss.kl_loss_coef:g}."
            if loss.kl_loss_coef
            else f"The KL to the reference model ({loss.kl_loss_type}) is measured, and not part of the loss."
        )
    if loss.entropy_coef:
        verb = "rewarded" if loss.entropy_coef > 0 else "penalized"
        sentences.append(f"Entropy is {verb}, weighted by {abs(loss.entropy_coef):g}.")
    return " ".join(sentences)


def token_weights(settings: Settings, short: int, long: int) -> dict[Aggregation, tuple[float, float, float]]:
    """Weight of one token's loss under each mode, in three answers of an imagined step.

    Half of the prompts are mixed: half of their answers have ``short`` tokens, half ``long``. The other prompts have
    long answers only. The three: short in a mixed group, long in a mixed group, long among long ones. L is the run's
    divisor, or ``long`` where it has none.
    """
    n = settings.global_batch_size
    mixed = (short + long) / 2  # mean length in a mixed group
    of_step = (mixed + long) / 2
    divisor = settings.loss.loss_aggregation_divisor or float(long)
    lengths: dict[Aggregation, tuple[float, float, float]] = {
        "sample_mean": (short, long, long),
        "prompt_mean": (mixed, mixed, long),
        "token_mean": (of_step, of_step, of_step),
        "constant": (divisor, divisor, divisor),
    }
    return {mode: (1 / (n * a), 1 / (n * b), 1 / (n * c)) for mode, (a, b, c) in lengths.items()}
