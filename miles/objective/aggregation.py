"""Aggregate token losses into the loss of a step: ``--loss-aggregation``, from the flag to the divisor.

All modes are one formula, ``1/N sum_i S_i / sample_denoms[i]`` with ``S_i = sum_t m_it l_it``, and differ in the
denominators alone. These are computed once over the whole step, before anything is split (docs/loss-aggregation.md):
``AggregationFlags`` -> ``reconcile_aggregation`` -> ``step_denominators`` (batch/convert.py calls it) ->
``TrainBatch`` -> batch/collate.py -> ``get_pg_loss_reducer`` (loss_types/policy_loss.py calls it).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Optional

from miles.base.flags import Errors, flag
from miles.objective.hooks import get_custom_pg_loss_reducer
from miles.objective.registry import Term

if TYPE_CHECKING:
    import torch

    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch

Aggregation = Literal["sample_mean", "prompt_mean", "token_mean", "constant", "delta_l"]

Reducer = Callable[["torch.Tensor"], "torch.Tensor"]
"""Maps the flat per-token vector [R] of a micro-batch to its fp32 scalar share of the step's value."""


# The flags ----------------------------------------------------------------------------------------------------------

# verl's name -> ours. Its sums are ours with a constant divisor.
VERL_MODES: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
    "token-sum": "constant",
}

# The flags of the mode and its numbers: --custom-pg-loss-reducer-function-path takes precedence over all of them.
MODE_FLAGS = (
    "loss_aggregation",
    "loss_aggregation_divisor",
    "loss_aggregation_alpha",
    "pg_loss_divisor",
    "loss_agg_mode",
    "loss_scale_factor",
)


@dataclass(frozen=True)
class AggregationFlags:
    """loss: the aggregation, under three vocabularies."""

    loss_aggregation: Aggregation = flag("sample_mean", "how per-token losses become the loss of the step")
    loss_aggregation_divisor: Optional[float] = flag(
        None, "L of --loss-aggregation constant: 1/(L N) sum of token losses; and of delta_l"
    )
    loss_aggregation_alpha: Optional[float] = flag(
        None, "exponent of --loss-aggregation delta_l, which weighs a trajectory of M tokens by M^-alpha; default 1"
    )
    calculate_per_token_loss: bool = flag(False, "divide by the step's token count; an older name of token_mean")
    pg_loss_divisor: Optional[float] = flag(None, "earlier name: --loss-aggregation constant with this divisor")
    loss_agg_mode: Optional[str] = flag(None, "verl's name of the aggregation", choices=tuple(VERL_MODES))
    loss_scale_factor: Optional[float] = flag(None, "the divisor where --loss-agg-mode has one")
    custom_pg_loss_reducer_function_path: Optional[str] = flag(
        None,
        "your reducer of the policy loss, module:function or module.function; takes precedence over the aggregation",
    )


# The modes: formula, denominators, mass ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """The loss tokens of a step: M_r per trajectory and M_g per group; and the constants that a mode may read.

    Attributes:
        of_trajectory: M_r by trajectory.
        of_group: M_g by group.
        trajectory_ids: The trajectory of each sample, [S].
        group_indices: The group of each sample, [S].
        divisor: L, ``--loss-aggregation-divisor``.
        alpha: ``--loss-aggregation-alpha``.
    """

    of_trajectory: Counter[int]
    of_group: Counter[int]
    trajectory_ids: Sequence[int]
    group_indices: Sequence[int]
    divisor: float | None
    alpha: float | None

    @property
    def trajectories(self) -> int:
        """N, the trajectories of the step."""
        return len(self.of_trajectory)

    @property
    def groups(self) -> int:
        """P, the groups of the step."""
        return len(self.of_group)

    @property
    def tokens(self) -> int:
        """T, the loss tokens of the step."""
        return sum(self.of_trajectory.values())

    def per_trajectory(self) -> list[float]:
        """``max(M_r, 1)`` of each sample's trajectory."""
        return [float(max(self.of_trajectory[r], 1)) for r in self.trajectory_ids]

    def group_of_trajectory(self) -> dict[int, int]:
        """Return the group of each trajectory."""
        return dict(zip(self.trajectory_ids, self.group_indices, strict=True))

    def checked_divisor(self) -> float:
        """Return L. Raises ``ValueError`` if it is missing or cannot divide."""
        if self.divisor is None or not math.isfinite(self.divisor) or self.divisor <= 0:
            raise ValueError(
                f"--loss-aggregation-divisor {self.divisor}: --loss-aggregation divides by it, so it must be a finite "
                "number above 0; give one, for example the longest response"
            )
        return float(self.divisor)


@dataclass(frozen=True)
class Mode:
    """One mode.

    Attributes:
        formula: pg_loss of the step; ``symbols`` defines the counts in it, ``words`` states the same in a sentence.
        denominator: What ``sample_denoms`` is made of, in words.
        denominators: ``sample_denoms`` of every sample.
        mass: The sum that a token loss of 1 everywhere gives, derived from the formula, not from the denominators,
            which it checks. A mean of ones is 1; a trajectory or prompt without a loss token keeps its place in the
            mean and adds nothing.
        whole_groups: Whether a step must hold whole groups.
        divides: Whether it reads L, ``--loss-aggregation-divisor``.
        default_alpha: ``--loss-aggregation-alpha`` if it is not given; None if the mode does not read it.
        used_by: The method that has it.
        sources: arXiv numbers of that.
    """

    formula: str
    symbols: str
    words: str
    denominator: str
    denominators: Callable[[Counts], list[float]]
    mass: Callable[[Counts], float]
    used_by: str
    sources: tuple[str, ...]
    whole_groups: bool = False
    divides: bool = False
    default_alpha: float | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The flags that it reads."""
        divisor = ("loss_aggregation_divisor",) if self.divides else ()
        return divisor if self.default_alpha is None else (*divisor, "loss_aggregation_alpha")


def _delta_l_weights(counts: Counts) -> tuple[dict[int, float], dict[int, float]]:
    """Return ``M_r^-α`` of each trajectory, 0 without loss tokens, and their sum over each group.

    The gradient of a whole response is an unbiased estimate whatever the response's length, and its variance grows
    with the length. So a prompt's responses are averaged with the weights of least variance, ``M_r^-α / Σ_j M_j^-α``
    with α = 1, over the unnormalized sums ``S_r`` (arXiv 2509.07558; VL Norm in its second version). Between α = 1 and
    α = 0 long responses keep more weight. With α = 0 this is ``constant``, if groups are equally large and every
    response has loss tokens: one without any counts in the mean of ``constant``, and has no weight here.
    """
    assert counts.alpha is not None, "the mode has a default"
    powers = {r: float(n) ** -counts.alpha if n else 0.0 for r, n in counts.of_trajectory.items()}
    return powers, _by_group(counts, powers)


def _by_group(counts: Counts, values: dict[int, float]) -> dict[int, float]:
    """Add up one value per trajectory over each group."""
    sums: defaultdict[int, float] = defaultdict(float)
    for trajectory, group in counts.group_of_trajectory().items():
        sums[group] += values[trajectory]
    return sums


def _delta_l_denominators(counts: Counts) -> list[float]:
    """Return ``L P / (N x_r)`` of each sample, [S], with its trajectory's weight ``x_r = M_r^-α / Σ_j M_j^-α``."""
    powers, sums = _delta_l_weights(counts)
    scale = counts.checked_divisor() * counts.groups / counts.trajectories
    return [
        scale * sums[g] / powers[r] if powers[r] else scale
        for r, g in zip(counts.trajectory_ids, counts.group_indices, strict=True)
    ]


def _delta_l_mass(counts: Counts) -> float:
    """Return the sum that a token loss of 1 everywhere gives: the weighted mean length of each prompt, over L."""
    powers, sums = _delta_l_weights(counts)
    tokens = _by_group(counts, {r: power * counts.of_trajectory[r] for r, power in powers.items()})
    means = sum(tokens[group] / sums[group] for group in sums if sums[group])
    return means / (counts.checked_divisor() * counts.groups)


MODES: dict[Aggregation, Mode] = {
    "sample_mean": Mode(
        used_by="GRPO",
        sources=("2402.03300",),
        formula="1/N Σ_r 1/M_r Σ_(i in r, t) m_it l_it",
        symbols="M_r = loss tokens of trajectory r",
        words="averaged over the tokens of each trajectory, then over trajectories: every trajectory weighs the same",
        denominators=lambda counts: counts.per_trajectory(),
        denominator="M_r, the loss tokens of its trajectory",
        mass=lambda counts: sum(count > 0 for count in counts.of_trajectory.values()) / counts.trajectories,
    ),
    "prompt_mean": Mode(
        used_by="DAPO's formula, ScaleRL",
        sources=("2503.14476", "2510.13786"),
        formula="1/P Σ_g 1/M_g Σ_(i in g, t) m_it l_it",
        symbols="M_g = loss tokens of group g",
        words="averaged over the tokens of each prompt's group, then over prompts: every prompt weighs the same",
        denominators=lambda counts: [
            max(counts.of_group[g], 1) * counts.groups / counts.trajectories for g in counts.group_indices
        ],
        denominator="M_g · P / N: loss tokens of its group, prompts and trajectories of the step",
        mass=lambda counts: sum(count > 0 for count in counts.of_group.values()) / counts.groups,
        whole_groups=True,
    ),
    "token_mean": Mode(
        used_by="DAPO's code",
        sources=("2503.14476",),
        formula="1/T Σ_(i, t) m_it l_it",
        symbols="T = loss tokens of the step",
        words="averaged over all tokens of the step: every token weighs the same, so long answers weigh more",
        denominators=lambda counts: [max(counts.tokens, 1) / counts.trajectories] * len(counts.trajectory_ids),
        denominator="T / N: loss tokens and trajectories of the step",
        mass=lambda counts: 1.0,
    ),
    "constant": Mode(
        used_by="Dr.GRPO (Eq. 2)",
        sources=("2503.20783",),
        formula="1/(L N) Σ_(i, t) m_it l_it",
        symbols="L = {divisor:g}",
        words="summed over tokens and divided by a constant: a token's weight does not depend on any length",
        denominators=lambda counts: [counts.checked_divisor()] * len(counts.trajectory_ids),
        denominator="L, --loss-aggregation-divisor",
        mass=lambda counts: counts.tokens / (counts.checked_divisor() * counts.trajectories),
        divides=True,
    ),
    "delta_l": Mode(
        used_by="ΔL normalization",
        sources=("2509.07558",),
        formula="1/(L P) Σ_g Σ_(r in g) x_r Σ_(i in r, t) m_it l_it",
        symbols="x_r = M_r^-{alpha:g} / Σ_(j in g) M_j^-{alpha:g}, M_r = loss tokens of trajectory r, L = {divisor:g}",
        words="summed over the tokens of each trajectory, averaged over each prompt's group with weights that fall "
        "with the length, then over prompts, and divided by a constant: long answers, which are noisier, weigh less",
        denominator="L · P / (N x_r), with the weight x_r of its trajectory's length",
        denominators=_delta_l_denominators,
        mass=_delta_l_mass,
        whole_groups=True,
        divides=True,
        default_alpha=1.0,
    ),
}


_DIAGNOSTIC_MODES: tuple[Aggregation, ...] = ("sample_mean", "token_mean")  # of everything but pg_loss


@dataclass(frozen=True)
class StepDenominators:
    """The counts of a whole step. Field for field the columns and numbers of ``TrainBatch`` of the same names."""

    sample_denoms: list[float]  # of pg_loss, one per sample
    trajectory_token_counts: list[float]  # max(M_r, 1) of the sample's trajectory
    num_trajectories: int  # N
    num_loss_tokens: int  # T
    expected_loss_mass: float  # sum over all tokens of m / (N * denom)


def step_denominators(
    mode: Aggregation,
    *,
    token_counts: Sequence[int],
    trajectory_ids: Sequence[int],
    group_indices: Sequence[int],
    divisor: float | None,
    alpha: float | None = None,
) -> StepDenominators:
    """Compute the denominators of one step from its samples: loss tokens M_i, trajectory and prompt group of each, [S].

    ``divisor`` is L of ``constant`` and ``delta_l``, ``alpha`` the exponent of ``delta_l``; the other modes do not read
    them. The example is the one of ``TrainBatch``:

    >>> example = dict(token_counts=[2, 6, 4, 8], trajectory_ids=[0, 1, 2, 3], group_indices=[0, 0, 1, 1], divisor=None)
    >>> step_denominators("prompt_mean", **example).sample_denoms
    [4.0, 4.0, 6.0, 6.0]
    """
    assert len(token_counts) == len(trajectory_ids) == len(group_indices)
    if alpha is None:
        alpha = MODES[mode].default_alpha
    counts = Counts(Counter(), Counter(), trajectory_ids, group_indices, divisor, alpha)
    for count, trajectory, group in zip(token_counts, trajectory_ids, group_indices, strict=True):
        counts.of_trajectory[trajectory] += count
        counts.of_group[group] += count
    return StepDenominators(
        sample_denoms=MODES[mode].denominators(counts),
        trajectory_token_counts=counts.per_trajectory(),
        num_trajectories=counts.trajectories,
        num_loss_tokens=counts.tokens,
        expected_loss_mass=MODES[mode].mass(counts) if counts.tokens else 0.0,
    )


def needs_whole_groups(loss: "LossArguments") -> bool:
    """Return whether the mode's mean would be lost if a step held a part of a group."""
    return MODES[loss.loss_aggregation].whole_groups


def aggregation_formula(name: str, loss: "LossArguments", shape: "StepShape") -> list[Term]:
    """Return the formula that makes the loss ``name`` of token losses, and the definitions of its counts."""
    n = f"N = {shape.num_trajectories} trajectories per step"
    if loss.custom_pg_loss_reducer_function_path is not None:
        path = loss.custom_pg_loss_reducer_function_path
        return [Term(f"{name} = {path}(m, l)", __name__, path), Term(n, __name__)]
    mode = MODES[loss.loss_aggregation]
    counts = [n]
    if mode.whole_groups:
        counts.append(f"P = {shape.num_trajectories // shape.samples_per_prompt} prompts per step")
    constants = {"divisor": loss.loss_aggregation_divisor or 0.0, "alpha": loss.loss_aggregation_alpha or 0.0}
    counts.append(mode.symbols.format(**constants))
    return [Term(f"{name} = {mode.formula}", __name__), Term(", ".join(counts), __name__)]


def check_diagnostic_mode(loss: "LossArguments", why: str, errors: Errors) -> None:
    """Refuse a mode that is for pg_loss alone, in a run without pg_loss."""
    mode = loss.loss_aggregation if loss.loss_agg_mode is None else VERL_MODES[loss.loss_agg_mode]
    if mode not in _DIAGNOSTIC_MODES:
        name = "loss_aggregation" if loss.loss_agg_mode is None else "loss_agg_mode"
        rule = f"would be ignored {why}, which knows {' and '.join(_DIAGNOSTIC_MODES)}"
        errors.refuse(name, getattr(loss, name), rule, "use one of these two")


def diagnostic_mode(loss: "LossArguments") -> Mode:
    """Return the mode of everything but pg_loss: the sample mean, or the token mean under ``token_mean``."""
    return MODES["token_mean" if is_per_token(loss) else "sample_mean"]


def token_weights(
    loss: "LossArguments", shape: "StepShape", short: int, long: int
) -> dict[Aggregation, tuple[float, float, float]]:
    """Compute the weight of one token's loss under each mode, in three answers of an imagined step.

    Half of the prompts are mixed: half of their answers have ``short`` tokens, half ``long``. The other prompts have
    long answers only. The three: short in a mixed group, long in a mixed group, long among long ones. L is the run's
    divisor, or ``long`` if it has none; alpha the run's, or the mode's default.
    """
    divisor = loss.loss_aggregation_divisor or float(long)
    weights: dict[Aggregation, tuple[float, float, float]] = {}
    for mode in MODES:
        step = step_denominators(
            mode,
            token_counts=[short, long, long, long],
            trajectory_ids=[0, 1, 2, 3],
            group_indices=[0, 0, 1, 1],
            divisor=divisor,
            alpha=loss.loss_aggregation_alpha,
        )
        a, b, c = (1 / (shape.num_trajectories * denominator) for denominator in step.sample_denoms[:3])
        weights[mode] = (a, b, c)
    return weights


# From token losses to a scalar ---------------------------------------------------------------------------------------


def get_pg_loss_reducer(loss: "LossArguments", micro: "MicroBatch") -> Reducer:
    """Return the reducer of pg_loss alone: the user's own if one is named, else the one of ``--loss-aggregation``.

    Raises:
        ValueError: If a mode that reads ``sample_denoms`` meets a micro-batch without them: another objective than the
            one asked for is never computed instead.
    """
    if loss.custom_pg_loss_reducer_function_path is not None:
        return get_custom_pg_loss_reducer(loss.custom_pg_loss_reducer_function_path, loss, micro)
    return get_default_pg_loss_reducer(loss, micro)


def get_default_pg_loss_reducer(loss: "LossArguments", micro: "MicroBatch") -> Reducer:
    """Return the reducer of ``--loss-aggregation``. Raises ``ValueError`` as ``get_pg_loss_reducer``."""
    if is_plain_mean(loss):
        return get_sum_of_sample_mean(micro, is_per_token(loss))
    num_denoms = 0 if micro.sample_denoms is None else len(micro.sample_denoms)
    if num_denoms != len(micro.response_lengths):
        raise ValueError(
            f"--loss-aggregation {loss.loss_aggregation}: the batch carries {num_denoms} sample_denoms for "
            f"{len(micro.response_lengths)} samples, and without them the objective is not known; "
            "let the converter keep one per sample (miles.objective.aggregation.step_denominators), "
            "or use --loss-aggregation sample_mean"
        )
    return _per_sample_reducer(micro, micro.sample_denoms)


def get_sum_of_sample_mean(micro: "MicroBatch", calculate_per_token_loss: bool) -> Reducer:
    """Return the reducer of all but pg_loss: ``1/N sum_r 1/M_r sum_t m l``, or ``1/T sum_t m l`` per token.

    A trajectory's mean is taken over all of its samples, on any rank. N and T count the whole step, so the sum
    over micro-batches and ranks is the step's value.
    """
    if calculate_per_token_loss:
        return weighted_sum(micro.loss_mask.float() / max(micro.num_loss_tokens, 1))
    return _per_sample_reducer(micro, micro.trajectory_token_counts)


def is_per_token(loss: "LossArguments") -> bool:
    """Return whether means are over the step's tokens. Validation sets this with ``token_mean``."""
    return loss.calculate_per_token_loss


def is_plain_mean(loss: "LossArguments") -> bool:
    """Return whether the loss is the mean over samples or tokens that ``get_sum_of_sample_mean`` takes."""
    return is_per_token(loss) or loss.loss_aggregation == "sample_mean"


def _per_sample_reducer(micro: "MicroBatch", denominators: "torch.Tensor") -> Reducer:
    """Return the reducer ``1/N sum_i S_i / denominators[i]``, ``S_i = sum_t m_it l_it``; denominators [S], above 0."""
    per_sample = 1.0 / (denominators.float() * micro.num_trajectories)
    return weighted_sum(per_sample.index_select(0, micro.sample_index).mul_(micro.loss_mask))


def weighted_sum(weights: "torch.Tensor") -> Reducer:
    """Return ``sum_t weights[t] values[t]`` in fp32. Values of weight 0 are not read: they may be NaN.

    >>> import torch
    >>> weights = torch.tensor([0.5, 0.0, 0.25])
    >>> float(weighted_sum(weights)(torch.tensor([1.0, float("nan"), 2.0])))
    1.0
    """

    def reduce(values: "torch.Tensor") -> "torch.Tensor":
        assert values.shape == weights.shape, f"{tuple(values.shape)} values for {tuple(weights.shape)} weights"
        return values.float().masked_fill(weights == 0, 0.0).dot(weights)

    return reduce


# Which mode the flags ask for: three vocabularies in, one mode and its divisor out -----------------------------------


def reconcile_aggregation(
    loss: "LossArguments",
    max_response_len: int | None,
    trajectories_per_step: int | None,
    samples_per_prompt: int,
    errors: Errors,
    is_explicit: bool = False,
) -> "tuple[LossArguments, list[str]]":
    """Reduce the three vocabularies to one ``loss_aggregation``; return the flags without aliases, and notes.

    Every combination that would ignore a flag or undo the normalization is an error (docs/loss-aggregation.md has the
    table). After an error, do not use the returned flags.

    Args:
        loss: The flags, as they were given.
        max_response_len: The longest response; None if it is not known, which has its own error.
        trajectories_per_step: N; None if it is not known, which has its own error.
        samples_per_prompt: The trajectories of a group.
        errors: Collects the errors.
        is_explicit: Whether the command gives ``--loss-aggregation``. Other flags may replace the default, but not the
            same value in the command.
    """
    notes: list[str] = []
    may_relabel = loss.loss_aggregation == "sample_mean" and not is_explicit
    loss = _from_pg_loss_divisor(loss, may_relabel, notes, errors)
    loss = _from_verl(loss, max_response_len, trajectories_per_step, may_relabel, notes, errors)
    if loss.pg_loss_divisor is not None or loss.loss_agg_mode is not None:
        return loss, notes  # which mode is meant is not known
    _check_divisor(loss, errors)
    loss = _settle_alpha(loss, errors)
    if loss.custom_pg_loss_reducer_function_path is not None:
        # pg_loss uses no mode; the reducer is given the switch of the per-token path, and diagnostics follow that.
        return replace(loss, **{name: getattr(type(loss), name) for name in MODE_FLAGS}), []
    loss = _reconcile_per_token(loss, notes, errors)
    if trajectories_per_step is not None:
        _check_whole_groups(loss, trajectories_per_step, samples_per_prompt, errors)
    return loss, notes


def _from_pg_loss_divisor(
    loss: "LossArguments", may_relabel: bool, notes: list[str], errors: Errors
) -> "LossArguments":
    """Return ``loss`` without this alias; unchanged, if it contradicts another flag."""
    divisor = loss.pg_loss_divisor
    if divisor is None:
        return loss
    what_to_do = "give --loss-aggregation constant --loss-aggregation-divisor L alone"
    if loss.loss_aggregation != "constant" and not may_relabel:
        errors.refuse("pg_loss_divisor", divisor, f"contradicts --loss-aggregation {loss.loss_aggregation}", what_to_do)
    if loss.loss_agg_mode is not None:
        errors.refuse("pg_loss_divisor", divisor, f"contradicts --loss-agg-mode {loss.loss_agg_mode}", what_to_do)
    if loss.loss_aggregation_divisor is not None:
        rule = f"names the divisor twice, alongside --loss-aggregation-divisor {loss.loss_aggregation_divisor:g}"
        errors.refuse("pg_loss_divisor", divisor, rule, what_to_do)
    _check_divisor_value("pg_loss_divisor", divisor, errors)
    if not errors.none_about("pg_loss_divisor"):
        return loss
    notes.append(f"--pg-loss-divisor {divisor:g} is read as --loss-aggregation constant with divisor {divisor:g}")
    return replace(loss, loss_aggregation="constant", loss_aggregation_divisor=divisor, pg_loss_divisor=None)


def _from_verl(
    loss: "LossArguments",
    longest: int | None,
    trajectories: int | None,
    may_relabel: bool,
    notes: list[str],
    errors: Errors,
) -> "LossArguments":
    """Return ``loss`` without verl's names; unchanged, if they contradict another flag."""
    name, factor = loss.loss_agg_mode, loss.loss_scale_factor
    if name is None:
        if factor is not None:
            what_to_do = "add --loss-agg-mode seq-mean-token-sum-norm, or use --loss-aggregation-divisor"
            errors.refuse("loss_scale_factor", factor, "would be ignored without --loss-agg-mode", what_to_do)
        return loss
    _check_with_verl(loss, name, may_relabel, errors)
    mode = VERL_MODES[name]
    divisor: float | None = None
    if name == "seq-mean-token-sum-norm":
        divisor = _verl_divisor(factor, longest, notes, errors)
        if divisor is None:
            return loss
    elif factor is not None:
        what_to_do = "use seq-mean-token-sum-norm, or drop --loss-scale-factor"
        errors.refuse("loss_scale_factor", factor, f"would be ignored by --loss-agg-mode {name}", what_to_do)
    elif name == "seq-mean-token-sum":
        divisor = 1.0
    elif name == "token-sum":
        divisor = 1.0 / (trajectories or 1)  # where N is not known, that is its own error
    if not errors.none_about("loss_agg_mode", "loss_scale_factor", "pg_loss_divisor", "calculate_per_token_loss"):
        return loss
    suffix = "" if divisor is None else f" with divisor {divisor:g}"
    if name == "token-sum":
        suffix += f", 1 / N for the N = {trajectories} trajectories of a step"
    elif name != "token-mean":
        suffix += "; verl leaves fully masked answers out of N if it knows no global batch size, and here they count"
    notes.append(f"--loss-agg-mode {name} is read as --loss-aggregation {mode}{suffix}")
    return replace(
        loss, loss_aggregation=mode, loss_aggregation_divisor=divisor, loss_agg_mode=None, loss_scale_factor=None
    )


def _check_with_verl(loss: "LossArguments", name: str, may_relabel: bool, errors: Errors) -> None:
    is_reduced_here = loss.custom_pg_loss_reducer_function_path is None
    if loss.calculate_per_token_loss and is_reduced_here and VERL_MODES[name] not in _DIAGNOSTIC_MODES:
        rule = f"would divide the normalization of --loss-agg-mode {name} away"
        errors.refuse("calculate_per_token_loss", True, rule, "drop it, or use --loss-agg-mode token-mean")
    is_same = loss.loss_aggregation == VERL_MODES[name] == "sample_mean"
    if not may_relabel and not is_same:
        rule = f"names the aggregation twice, alongside --loss-aggregation {loss.loss_aggregation}"
        errors.refuse("loss_agg_mode", name, rule, "keep one of the two")
    elif loss.loss_aggregation_divisor is not None:
        rule = f"cannot use --loss-aggregation-divisor {loss.loss_aggregation_divisor:g}"
        what_to_do = "give the divisor as --loss-scale-factor, or use --loss-aggregation constant"
        errors.refuse("loss_agg_mode", name, rule, what_to_do)


def _verl_divisor(factor: float | None, max_response_len: int | None, notes: list[str], errors: Errors) -> float | None:
    if factor is not None:
        _check_divisor_value("loss_scale_factor", factor, errors)
        return factor
    if max_response_len is None:
        return None
    notes.append(
        f"--loss-scale-factor is not given: --rollout-max-response-len {max_response_len} is used, as verl uses the "
        "padded response length"
    )
    return float(max_response_len)


def _check_divisor(loss: "LossArguments", errors: Errors) -> None:
    mode, divisor = loss.loss_aggregation, loss.loss_aggregation_divisor
    if not MODES[mode].divides:
        if divisor is not None:
            rule = f"would be ignored by --loss-aggregation {mode}"
            what_to_do = "use --loss-aggregation constant, or drop --loss-aggregation-divisor"
            errors.refuse("loss_aggregation_divisor", divisor, rule, what_to_do)
    elif divisor is not None:
        _check_divisor_value("loss_aggregation_divisor", divisor, errors)
    elif errors.none_about("loss_aggregation") and loss.custom_pg_loss_reducer_function_path is None:
        what_to_do = "add --loss-aggregation-divisor L; the longest response, --rollout-max-response-len, is usual"
        errors.refuse("loss_aggregation", mode, "needs the number that token losses are divided by", what_to_do)


def _settle_alpha(loss: "LossArguments", errors: Errors) -> "LossArguments":
    """Return ``loss`` with the mode's own alpha if it reads one and none is given."""
    default, alpha = MODES[loss.loss_aggregation].default_alpha, loss.loss_aggregation_alpha
    if alpha is None:
        return loss if default is None else replace(loss, loss_aggregation_alpha=default)
    if default is None:
        rule = f"would be ignored by --loss-aggregation {loss.loss_aggregation}"
        errors.refuse("loss_aggregation_alpha", alpha, rule, "use --loss-aggregation delta_l, or drop it")
    elif not 0 <= alpha <= 1:
        rule = "must be from 0, which is constant, to 1, which has the least variance"
        errors.refuse("loss_aggregation_alpha", alpha, rule, "the paper uses 1, and 0.75 for long answers")
    return loss


def _check_divisor_value(field: str, divisor: float, errors: Errors) -> None:
    if not (math.isfinite(divisor) and divisor > 0):
        errors.refuse(field, divisor, "the divisor must be finite and above 0", "the longest response length is usual")


def _reconcile_per_token(loss: "LossArguments", notes: list[str], errors: Errors) -> "LossArguments":
    """Set both of ``token_mean`` and the per-token path if either is set: they are one setting."""
    mode, per_token = loss.loss_aggregation, loss.calculate_per_token_loss
    if mode == "token_mean" and not per_token:
        notes.append("--loss-aggregation token_mean sets --calculate-per-token-loss")
    elif mode == "sample_mean" and per_token:
        notes.append("--calculate-per-token-loss is --loss-aggregation token_mean: relabelled, same computation")
    elif per_token and mode != "token_mean":
        rule = f"would divide the normalization of --loss-aggregation {mode} away"
        errors.refuse("calculate_per_token_loss", True, rule, "drop it, or use --loss-aggregation token_mean")
        return loss
    if mode == "token_mean" or per_token:
        return replace(loss, loss_aggregation="token_mean", calculate_per_token_loss=True)
    return loss


def _check_whole_groups(
    loss: "LossArguments", trajectories_per_step: int, samples_per_prompt: int, errors: Errors
) -> None:
    """Check that steps end where groups end, if the mode stays and the sizes are valid."""
    if not errors.none_about("loss_aggregation", "n_samples_per_prompt", "global_batch_size"):
        return
    if needs_whole_groups(loss) and trajectories_per_step % samples_per_prompt:
        rule = (
            f"a step of --global-batch-size {trajectories_per_step} trajectories could cut a prompt group of "
            f"--n-samples-per-prompt {samples_per_prompt} in two"
        )
        what_to_do = f"make --global-batch-size a multiple of {samples_per_prompt}, or use another aggregation"
        errors.refuse("loss_aggregation", loss.loss_aggregation, rule, what_to_do)
