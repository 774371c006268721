"""Measure bias and variance of estimators, aggregations and corrections exactly: ``python measure.py FOLDER``.

Advantages, denominators, token losses and weights are computed by miles' own code, for every step that can be drawn
(task.py). The expected gradient is the sum over steps of probability times gradient; nothing is simulated. ``--check``
draws steps at random as well, and compares.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import task
import torch
from task import GROUP, PLACES, POLICY, PROMPTS, RESPONSES, RIGHT, SAMPLER, SHORT, Steps

from miles.objective.aggregation import MODES, Aggregation, step_denominators
from miles.objective.chosen import build_objective
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import SampleRewards
from miles.objective.loss_types.policy_loss import policy_loss_function
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.policy_losses.base import StepTokens
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages
from miles.objective.token_weights import mean_weight, sum_of_weights
from miles.types.groups import ALONE
from miles.types.train_batch import MicroBatch

N = PROMPTS * GROUP
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")  # defined with --normalize-advantages
ESTIMATOR_ROWS: dict[str, dict[str, Any]] = {
    **{
        name: dict(advantage_estimator=name, normalize_advantages=name in WHITENED)
        for name in ESTIMATORS
        if name != "gspo"  # the same advantages as grpo
    },
    "grpo, no std": dict(advantage_estimator="grpo", disable_grpo_std_normalization=True),
    "grpo, whitened": dict(advantage_estimator="grpo", normalize_advantages=True),
    "raw reward": dict(advantage_estimator="grpo", disable_rewards_normalization=True),
    "ppo, lambda 0.5": dict(advantage_estimator="ppo", lambd=0.5),
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis, token": dict(use_tis=True, tis_clip=1e6),
    "tis, token, at most 1.2": dict(use_tis=True, tis_clip=1.2),
    "tis, sequence": dict(use_tis=True, tis_clip=1e6, tis_level="sequence"),
    "tis, sequence, at most 1.2": dict(use_tis=True, tis_clip=1.2, tis_level="sequence"),
    "tis, geometric": dict(use_tis=True, tis_clip=1e6, tis_level="geometric"),
    "icepop, 0.8 to 1.2": dict(use_tis=True, tis_mode="icepop", tis_clip=1.2, tis_clip_low=0.8),
    "tis, token, at most 1.2, normalized": dict(use_tis=True, tis_clip=1.2, tis_batch_normalize=True),
    "rejection, token, 0.8 to 1.2": dict(use_rs=True, rs_lower_bound=0.8, rs_upper_bound=1.2),
    "rejection, geometric, 0.9 to 1.1": dict(use_rs=True, rs_level="geometric", rs_lower_bound=0.9, rs_upper_bound=1.1),
    "rejection, sequence, 0.8 to 1.2": dict(use_rs=True, rs_level="sequence", rs_lower_bound=0.8, rs_upper_bound=1.2),
}
PLAIN = "ppo"  # the policy loss that OPSM is measured with
OPSM = dict(use_opsm=True, opsm_delta=0.05)  # compares with the old policy, so it drops something in a later step only
EXACT = 2e-5  # losses are fp32


@dataclass(frozen=True)
class Row:
    """A measured choice, by name, and its figures.

    Attributes:
        scale: The gradient's length along the mean reward's gradient: 1 is the gradient itself.
        bias: The part of the expected gradient that is not along the gradient of the mean reward, over its length.
        bias_within_prompts: The same with each prompt's gradient free to be scaled by its own factor: 0 if each
            prompt's part is along the gradient of that prompt's mean reward.
        prompt_weight: The weight of the harder prompt over the easier prompt's, both relative to the mean reward's.
        curl: Asymmetry of the expected gradient's derivative, over its size: 0 if it is the gradient of anything.
            Measured on-policy, and without a critic or a baseline that would have to follow the policy.
        noise: The variance of a step's gradient, summed over parameters, over the squared length of its mean.
        objective: The function that it is exactly the gradient of, up to a factor, if that has a name.
    """

    kind: str
    estimator: str
    aggregation: str
    correction: str
    scale: float
    bias: float
    bias_within_prompts: float
    prompt_weight: float
    curl: float | None
    noise: float
    objective: str


def loss_of(flags: dict[str, Any], aggregation: Aggregation = "constant", **more: Any) -> LossArguments:
    """Return the flags. ``token_mean`` goes through the denominators T / N of its per-token path."""
    mode = MODES[aggregation]
    return LossArguments(
        loss_aggregation=aggregation,
        loss_aggregation_divisor=float(PLACES) if mode.divides else None,
        loss_aggregation_alpha=mode.default_alpha,
        **flags,
        **more,
    )


def rewards_of(loss: LossArguments) -> np.ndarray:
    """Return the reward of each response, [prompts, responses]: gdpo has a second one of weight 0.5."""
    return RIGHT + 0.5 * SHORT if loss.advantage_estimator == "gdpo" else RIGHT


def advantages_of(steps: Steps, loss: LossArguments, logits: np.ndarray, old: np.ndarray | None = None) -> np.ndarray:
    """Compute the advantage of every token of every step, [tokens], step by step as a run does.

    ``logits`` are those that responses are drawn from, ``old`` the trainer's; by default the same.
    """
    objective, advantages = build_objective(loss), []
    trainers = task.log_probs(logits if old is None else old)
    table, critic = rewards_of(loss), task.values(logits, rewards_of(loss))
    for draw in steps.draws:
        pairs = [(x, k) for x, group in enumerate(draw) for k in group]
        of_step = objective.sample_advantages(
            SampleRewards(
                [float(table[x, k]) for x, k in pairs],
                [x for x, _ in pairs],
                range(N),
                [len(RESPONSES[k]) for _, k in pairs],
                parts=[{"right": RIGHT[x, k], "short": SHORT[x, k]} for x, k in pairs],
                part_weights={"right": 1.0, "short": 0.5},
                baselines=[float(table[x, task.greedy(logits, x)]) for x, _ in pairs],
            )
        )
        if build_objective(loss).estimates_by_token:
            samples = [
                SampleTokens(
                    i,
                    reward,
                    np.ones(len(RESPONSES[k])),
                    critic[x][k] if loss.has_critic else None,
                    group_index=x,
                    # 1 - 2 p + p^2 + (1 - p)^2 of two tokens
                    score_norm=2 * (1 - np.exp(trainers[x][k])) ** 2,
                )
                for i, (reward, (x, k)) in enumerate(zip(of_step, pairs, strict=True))
            ]
            advantages += token_advantages(objective, samples).advantages
        else:
            advantages += [np.full(len(RESPONSES[k]), a) for a, (_, k) in zip(of_step, pairs, strict=True)]
    return np.concatenate(advantages)


def denominators_of(steps: Steps, loss: LossArguments) -> list[float]:
    """Compute ``sample_denoms`` of every sample, step by step as a run does."""
    return [
        denominator
        for draw in steps.draws
        for denominator in step_denominators(
            loss.loss_aggregation,
            token_counts=[len(RESPONSES[k]) for group in draw for k in group],
            trajectory_ids=range(N),
            group_indices=[x for x, group in enumerate(draw) for _ in group],
            divisor=loss.loss_aggregation_divisor,
            alpha=loss.loss_aggregation_alpha,
        ).sample_denoms
    ]


def selected_tokens(
    steps: Steps, loss: LossArguments, advantages: np.ndarray, current: np.ndarray, old: np.ndarray
) -> np.ndarray | None:
    """Return the tokens that the policy loss treats apart, bool [tokens], chosen step by step; None if it has none."""
    objective = build_objective(loss)
    if not objective.selects_tokens:
        return None
    columns = (steps.column(task.log_probs(current)), steps.column(task.log_probs(old)), advantages)
    starts = np.flatnonzero(np.diff(steps.tokens[0])) + 1
    of_steps = zip(*(np.split(column, starts) for column in columns), strict=True)
    choices = [
        objective.policy_loss.select_tokens(loss, StepTokens(*of_step, seed=number))
        for number, of_step in enumerate(of_steps)
    ]
    return np.concatenate(choices)


def mean_weights(steps: Steps, loss: LossArguments, old: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """Compute each step's mean, which divides the weights with ``--tis-batch-normalize``, [steps]."""
    trainer, engine = task.log_probs(old), task.log_probs(sampler)
    sums = [
        [sum_of_weights(loss, torch.tensor(trainer[x][k] - engine[x][k])) for k in range(len(RESPONSES))]
        for x in range(PROMPTS)
    ]
    return np.array([mean_weight(sums[x][k] for x, group in enumerate(draw) for k in group) for draw in steps.draws])


def token_weights(
    steps: Steps,
    loss: LossArguments,
    advantages: np.ndarray,
    denominators: list[float],
    current: np.ndarray,
    old: np.ndarray,
    sampler: np.ndarray,
) -> np.ndarray:
    """Return d loss / d log p of every token, [tokens], by the policy loss that a run uses.

    All steps are one micro-batch here: the loss is a sum over samples, each divided by the denominators of its step.
    """

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.float32)

    lengths = steps.lengths
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    zeros = torch.zeros(len(index), dtype=torch.int64)
    chosen = selected_tokens(steps, loss, advantages, current, old)
    micro = MicroBatch(
        input_ids=zeros,
        position_ids=zeros,
        token_index=zeros,
        logit_index=zeros,
        targets=zeros,
        sample_index=index,
        response_index=torch.arange(len(index)),
        loss_mask=torch.ones(len(index)),
        advantages=tensor(advantages),
        rollout_log_probs=tensor(steps.column(task.log_probs(sampler))),
        old_log_probs=tensor(steps.column(task.log_probs(old))),
        ref_log_probs=None,
        sample_denoms=tensor(denominators),
        trajectory_token_counts=tensor(lengths),
        response_lengths=tuple(lengths),
        total_lengths=tuple(n + 1 for n in lengths),
        read_lengths=tuple(n + 1 for n in lengths),
        num_trajectories=N,
        num_loss_tokens=sum(lengths),
        context=ALONE,
        selected=None if chosen is None else tensor(chosen),
        tis_mean=1.0,  # the mean of each step is below, as the steps share a micro-batch
    )
    leaf = tensor(steps.column(task.log_probs(current))).requires_grad_()
    policy_loss_function(build_objective(loss), micro, leaf, None).loss.backward()
    assert leaf.grad is not None
    weights: np.ndarray = leaf.grad.double().numpy()
    return weights / mean_weights(steps, loss, old, sampler)[steps.tokens[0]] if loss.tis_batch_normalize else weights


@dataclass(frozen=True, eq=False)
class Meter:
    """Measures one choice after another on the same steps, and keeps what several choices share."""

    steps: Steps
    policy: np.ndarray  # log-odds that are trained, at which gradients are taken
    old: np.ndarray  # log-odds of the iteration's first weights
    sampler: np.ndarray  # log-odds that the responses were drawn from

    def measure(self, kind: str, names: tuple[str, str, str], loss: LossArguments, with_curl: bool = False) -> Row:
        """Return the figures of one choice; ``names`` has the estimator (or policy loss), mode and correction."""
        weights = token_weights(
            self.steps,
            loss,
            self._advantages(replace_mode(loss)),
            self._denominators(loss),
            self.policy,
            self.old,
            self.sampler,
        )
        gradients = -self.steps.gradients(weights, self.policy)  # the loss falls as the objective rises
        p = self._probabilities()
        mean = np.tensordot(p, gradients, 1)
        spread = float((p * ((gradients - mean) ** 2).sum((1, 2))).sum())
        target = task.gradient_of_mean(self.policy, rewards_of(loss)) / PROMPTS
        scale = float((mean * target).sum() / (target**2).sum())
        factors = (mean * target).sum(1) / (target**2).sum(1)
        size = float(np.linalg.norm(mean))
        within = float(np.linalg.norm(mean - factors[:, None] * target) / size)
        bias = float(np.linalg.norm(mean - scale * target) / size)
        follows_policy = loss.has_critic or build_objective(loss).estimator.reads_score_norms
        curl = self._curl(weights) if with_curl and not follows_policy else None
        name = _name_of(bias, within, factors, self.policy, curl)
        return Row(kind, *names, scale, bias, within, float(factors[0] / factors[1]), curl, spread / size**2, name)

    @cache  # noqa: B019 - a meter lives as long as the program
    def _advantages(self, loss: LossArguments) -> np.ndarray:
        return advantages_of(self.steps, loss, self.sampler, self.old)

    @cache  # noqa: B019
    def _denominators_of_mode(self, loss: LossArguments) -> list[float]:
        return denominators_of(self.steps, loss)

    def _denominators(self, loss: LossArguments) -> list[float]:
        return self._denominators_of_mode(loss_of({}, loss.loss_aggregation))

    @cache  # noqa: B019
    def _probabilities(self) -> np.ndarray:
        return self.steps.probabilities(self.sampler)

    def _curl(self, weights: np.ndarray, h: float = 1e-4) -> float:
        """Return ``|J - J^T| / |J|`` of the expected gradient's derivative J, on-policy, by central differences.

        On-policy the weights of tokens do not depend on the policy: rewards, lengths and a fixed critic make them.
        """

        def expected(logits: np.ndarray) -> np.ndarray:
            return np.tensordot(self.steps.probabilities(logits), -self.steps.gradients(weights, logits), 1).ravel()

        size = PROMPTS * PLACES
        jacobian = np.empty((size, size))
        for i in range(size):
            shift = np.zeros(size)
            shift[i] = h
            moved = shift.reshape(PROMPTS, PLACES)
            jacobian[:, i] = (expected(self.policy + moved) - expected(self.policy - moved)) / (2 * h)
        return float(np.linalg.norm(jacobian - jacobian.T) / np.linalg.norm(jacobian))


def replace_mode(loss: LossArguments) -> LossArguments:
    """Return the flags that advantages depend on, with one aggregation and no corrections for all."""
    return replace(
        loss,
        loss_aggregation="sample_mean",
        loss_aggregation_divisor=None,
        loss_aggregation_alpha=None,
        policy_loss=None,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        tis_mode="truncate",
        tis_level="token",
        tis_batch_normalize=False,
        use_opsm=False,
        opsm_delta=1e-4,
        use_rs=False,
        rs_level="token",
        rs_lower_bound=0.5,
        rs_upper_bound=2.0,
    )


def _name_of(bias: float, within: float, factors: np.ndarray, logits: np.ndarray, curl: float | None) -> str:
    """Name the function of the prompts' success rates p that this is the gradient of, up to a factor."""
    if bias < EXACT:
        return "mean reward"
    is_gradient = curl is not None and curl < EXACT
    if within > EXACT:
        return "another function" if is_gradient else ""
    p = (task.probabilities(logits) * RIGHT).sum(1)
    slopes = {
        "log p, its first 3 terms": sum((1 - p) ** k for k in range(GROUP - 1)),
        "pass@2": 2 * (1 - p),
        "pass@4": 4 * (1 - p) ** 3,
    }
    for name, slope in slopes.items():
        if abs(factors[0] / factors[1] / (slope[0] / slope[1]) - 1) < EXACT:
            return name
    return "a function of p" if is_gradient else ""


def rows() -> Iterator[Row]:
    """Measure everything."""
    steps = Steps.all()
    on_policy = Meter(steps, POLICY, POLICY, POLICY)
    engine = Meter(steps, POLICY, POLICY, SAMPLER)
    later = Meter(steps, POLICY, SAMPLER, SAMPLER)
    modes: tuple[Aggregation, ...] = get_args(Aggregation)
    for estimator, flags in ESTIMATOR_ROWS.items():
        for mode in modes:
            yield on_policy.measure("on-policy", (estimator, mode, "none"), loss_of(flags, mode), with_curl=True)
            for correction, more in CORRECTIONS.items():
                yield engine.measure("another sampler", (estimator, mode, correction), loss_of(flags, mode, **more))
    rloo = dict(advantage_estimator="rloo")
    for name in POLICY_LOSSES:
        for mode in modes:
            yield later.measure("a later step", (name, mode, "none"), loss_of(rloo, mode, policy_loss=name))
            if name == PLAIN:
                yield later.measure("a later step", (name, mode, "opsm"), loss_of(rloo, mode, policy_loss=name, **OPSM))


def check_by_sampling(count: int, seed: int = 0) -> list[str]:
    """Compare exact means with the means of ``count`` steps drawn at random; return the z-score of each, in words."""
    rng, lines = np.random.default_rng(seed), []
    for estimator, mode, correction in (
        ("rloo", "constant", "tis, sequence"),
        ("grpo", "sample_mean", "none"),
        ("maxrl", "token_mean", "tis, token"),
        ("opo", "delta_l", "icepop, 0.8 to 1.2"),
    ):
        loss = loss_of(ESTIMATOR_ROWS[estimator], mode, **CORRECTIONS[correction])  # type: ignore[arg-type]
        gradients = []
        for steps in (Steps.all(), Steps.drawn(rng, SAMPLER, count)):
            meter = Meter(steps, POLICY, POLICY, SAMPLER)
            advantages, denominators = meter._advantages(replace_mode(loss)), meter._denominators(loss)
            weights = token_weights(steps, loss, advantages, denominators, POLICY, POLICY, SAMPLER)
            gradients.append(steps.gradients(weights, POLICY))
        exact = np.tensordot(Steps.all().probabilities(SAMPLER), gradients[0], 1)
        error = gradients[1].std(0, ddof=1) / np.sqrt(count)
        z = float(np.abs((gradients[1].mean(0) - exact) / error).max())
        lines.append(f"{estimator}, {mode}, {correction}: largest of 6 z-scores {z:.2f}")
        assert z < 4.5, lines[-1]
    return lines


def write(table: list[Row], path: Path) -> None:
    """Write the rows as CSV, with six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.__dataclass_fields__)
        for row in table:
            writer.writerow([_shown(value) for value in vars(row).values()])


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{0.0 if abs(value) < EXACT else value:.4g}"


def main() -> None:
    """Write ``results.csv`` into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", type=int, default=0, metavar="STEPS", help="compare with this many random steps")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    table = list(rows())
    write(table, options.folder / "results.csv")
    print(f"{len(table)} rows in {options.folder / 'results.csv'}")
    if options.check:
        print("\n".join(check_by_sampling(options.check)))


if __name__ == "__main__":
    main()
