"""The objectives against a float64 oracle that reads the table of docs/loss-aggregation.md literally."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR, FEW_ROUNDINGS, rounding_error

from miles.objective.aggregation import (
    Aggregation,
    StepDenominators,
    get_pg_loss_reducer,
    get_sum_of_sample_mean,
    step_denominators,
)
from miles.objective.settings import LossArguments

MODES: list[Aggregation] = ["sample_mean", "prompt_mean", "token_mean", "constant", "delta_l"]
DIVIDED = ("constant", "delta_l")
ALPHA = 0.75
DIVISOR = 8.0


@dataclass(frozen=True)
class Row:
    """A sample: its trajectory and group, and mask and loss of each response token."""

    group: int
    rollout: int
    mask: list[int]
    losses: list[float]

    @property
    def mass(self) -> int:
        return sum(self.mask)

    @property
    def loss_sum(self) -> float:
        return sum(x for m, x in zip(self.mask, self.losses, strict=True) if m)


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    """Uneven groups of rollouts of one to three samples, any of them fully masked or empty, in any order."""
    rows: list[Row] = []
    rollout = 0
    for group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 3))):
            for _ in range(draw(st.integers(1, 3))):
                mask = draw(st.lists(st.integers(0, 1), max_size=6))
                losses = draw(st.lists(st.floats(-4, 4, width=32), min_size=len(mask), max_size=len(mask)))
                rows.append(Row(group + 10, rollout, mask, losses))
            rollout += 1
    return draw(st.permutations(rows))


def oracle(mode: str, rows: list[Row], token_losses: list[float] | None = None) -> float:
    """The table, row by row. ``token_losses`` are the samples' sums of masked token losses."""
    sums = [r.loss_sum for r in rows] if token_losses is None else token_losses

    def mean_of_means(key: str) -> float:
        names = {getattr(r, key) for r in rows}
        total = 0.0
        for name in names:
            members = [i for i, r in enumerate(rows) if getattr(r, key) == name]
            total += sum(sums[i] for i in members) / max(sum(rows[i].mass for i in members), 1)
        return total / len(names)

    def mean_of_weighted_sums() -> float:
        total = 0.0
        for group in {r.group for r in rows}:
            lengths: dict[int, int] = {}
            for r in rows:
                if r.group == group:
                    lengths[r.rollout] = lengths.get(r.rollout, 0) + r.mass
            powers = {name: length**-ALPHA for name, length in lengths.items() if length}
            for i, r in enumerate(rows):
                if r.rollout in powers:
                    total += powers[r.rollout] / sum(powers.values()) * sums[i]
        return total / (DIVISOR * len({r.group for r in rows}))

    if mode == "sample_mean":
        return mean_of_means("rollout")
    if mode == "prompt_mean":
        return mean_of_means("group")
    if mode == "token_mean":
        return sum(sums) / max(sum(r.mass for r in rows), 1)
    if mode == "delta_l":
        return mean_of_weighted_sums()
    return sum(sums) / (DIVISOR * len({r.rollout for r in rows}))


def denominators_of(mode: Aggregation, rows: list[Row]) -> StepDenominators:
    return step_denominators(
        mode,
        token_counts=[r.mass for r in rows],
        trajectory_ids=[r.rollout for r in rows],
        group_indices=[r.group for r in rows],
        divisor=DIVISOR if mode in DIVIDED else None,
        alpha=ALPHA if mode == "delta_l" else None,
    )


def loss_arguments(mode: Aggregation) -> LossArguments:
    return LossArguments(loss_aggregation=mode, loss_aggregation_divisor=DIVISOR if mode in DIVIDED else None)


def reduced(make_micro, mode: Aggregation, rows: list[Row], parts: list[list[int]]) -> tuple[float, list[torch.Tensor]]:
    """The sum over micro-batches ``parts`` of the reducer's values, and the gradient of each sample's losses."""
    step = denominators_of(mode, rows)
    value, gradients = 0.0, [torch.empty(0)] * len(rows)
    for part in parts:
        micro = make_micro(
            [rows[i].mask for i in part],
            sample_denoms=torch.tensor([step.sample_denoms[i] for i in part]),
            trajectory_token_counts=torch.tensor([step.trajectory_token_counts[i] for i in part]),
            num_trajectories=step.num_trajectories,
            num_loss_tokens=step.num_loss_tokens,
        )
        losses = torch.tensor([x for i in part for x in rows[i].losses], requires_grad=True)
        result = get_pg_loss_reducer(loss_arguments(mode), micro)(losses)
        result.backward()
        value += result.item()
        assert losses.grad is not None
        for i, grad in zip(part, losses.grad.split(list(micro.response_lengths)), strict=True):
            gradients[i] = grad
    return value, gradients


def constant_rows(values: list[float]) -> list[Row]:
    """The worked example: two prompts, two rollouts each, lengths 2, 6 | 4, 8, with these token losses."""
    return [Row(i // 2, i, [1] * n, [v] * n) for i, (n, v) in enumerate(zip([2, 6, 4, 8], values, strict=True))]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [*zip(MODES, [0.25, 0.125, 0.1, 0.0625, 2 * 2**-ALPHA / (2**-ALPHA + 6**-ALPHA) / 16], strict=True)],
)
def test_worked_example(make_micro, mode, expected):
    rows = constant_rows([1.0, 0.0, 0.0, 0.0])
    assert reduced(make_micro, mode, rows, [[0, 1, 2, 3]])[0] == pytest.approx(expected, rel=FEW_ROUNDINGS)
    assert oracle(mode, rows) == pytest.approx(expected)
    step = denominators_of(mode, rows)
    assert (step.num_trajectories, step.num_loss_tokens) == (4, 20)
    assert step.trajectory_token_counts == [2, 6, 4, 8]


@given(rows=steps(), mode=st.sampled_from(MODES))
def test_denominators_give_the_table(rows, mode):
    step = denominators_of(mode, rows)
    built = sum(r.loss_sum / d for r, d in zip(rows, step.sample_denoms, strict=True)) / step.num_trajectories
    assert built == pytest.approx(oracle(mode, rows), rel=DOUBLE_ERROR, abs=DOUBLE_ERROR)
    assert step.expected_loss_mass == pytest.approx(oracle(mode, rows, [r.mass for r in rows]), rel=DOUBLE_ERROR)


@given(rows=steps(), mode=st.sampled_from(MODES), data=st.data())
def test_no_split_into_micro_batches_changes_value_or_gradient(make_micro, rows, mode, data):
    whole, whole_gradients = reduced(make_micro, mode, rows, [list(range(len(rows)))])
    place = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    parts = [[i for i, p in enumerate(place) if p == part] for part in range(5)]  # some of them empty
    split, split_gradients = reduced(make_micro, mode, rows, parts)
    expected_mass = denominators_of(mode, rows).expected_loss_mass
    error = rounding_error(10 + sum(r.mass for r in rows), expected_mass)  # of a sum of weights; each loss is up to 4
    assert whole == pytest.approx(oracle(mode, rows), abs=4 * error)
    assert split == pytest.approx(whole, abs=4 * error)
    torch.testing.assert_close(split_gradients, whole_gradients)
    mass = sum(float(g.sum()) for g in whole_gradients)
    assert mass == pytest.approx(expected_mass, abs=error)


def test_a_fully_masked_rollout_counts_in_n_only():
    rows = [*constant_rows([1.0, 1.0, 1.0, 1.0]), Row(1, 4, [0, 0, 0], [7.0] * 3)]
    step = denominators_of("sample_mean", rows)
    assert (step.num_trajectories, step.num_loss_tokens, step.trajectory_token_counts[-1]) == (5, 20, 1.0)
    assert step.expected_loss_mass == pytest.approx(4 / 5)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_loss_tokens_is_zero(make_micro, mode):
    rows = [Row(0, 0, [0, 0], [1.0, 2.0]), Row(0, 1, [], [])]
    value, gradients = reduced(make_micro, mode, rows, [[0, 1]])
    assert value == 0.0 == denominators_of(mode, rows).expected_loss_mass
    assert not gradients[0].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_masked_values_are_not_read(make_micro, mode, poison):
    micro = make_micro([[1, 0], [0, 1]])
    losses = torch.tensor([2.0, poison, poison, 4.0], requires_grad=True)
    result = get_pg_loss_reducer(loss_arguments(mode), micro)(losses)
    result.backward()
    clean = get_pg_loss_reducer(loss_arguments(mode), micro)(torch.tensor([2.0, 0.0, 0.0, 4.0]))
    assert result.item() == clean.item() != 0.0
    assert losses.grad is not None and losses.grad[1:3].tolist() == [0.0, 0.0]


def test_low_precision_losses_are_summed_in_fp32(make_micro):
    micro = make_micro([[1] * 1000])
    value = get_sum_of_sample_mean(micro, calculate_per_token_loss=False)(torch.ones(1000, dtype=torch.bfloat16))
    assert value.dtype == torch.float32 and value.item() == pytest.approx(1.0, abs=rounding_error(1000, 1.0))


@pytest.mark.parametrize("mode", ["prompt_mean", "constant"])
@pytest.mark.parametrize("denoms", [None, torch.ones(1)])
def test_missing_denominators_are_an_error_not_a_sample_mean(make_micro, mode, denoms):
    micro = replace(make_micro([[1], [1, 1]]), sample_denoms=denoms)
    with pytest.raises(ValueError, match=f"--loss-aggregation {mode}.*2 samples"):
        get_pg_loss_reducer(loss_arguments(mode), micro)


@pytest.mark.parametrize("divisor", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_constant_needs_a_divisor(divisor):
    with pytest.raises(ValueError, match="--loss-aggregation-divisor"):
        step_denominators("constant", token_counts=[1], trajectory_ids=[0], group_indices=[0], divisor=divisor)


EXAMPLE = dict(token_counts=[2, 6, 4, 8], trajectory_ids=[0, 1, 2, 3], group_indices=[0, 0, 1, 1], divisor=8.0)


def test_delta_l_without_alpha_is_constant():
    assert step_denominators("delta_l", **EXAMPLE, alpha=0.0) == step_denominators("constant", **EXAMPLE)


def test_an_answer_without_loss_tokens_has_a_place_in_constant_and_no_weight_in_delta_l():
    step = dict(token_counts=[0, 10, 5, 5], trajectory_ids=[0, 1, 2, 3], group_indices=[0, 0, 1, 1], divisor=10.0)
    assert step_denominators("constant", **step).sample_denoms == [10.0] * 4
    assert step_denominators("delta_l", **step, alpha=0.0).sample_denoms[1:] == [5.0, 10.0, 10.0]


def one_group(lengths, mode, alpha=None):
    """Return the denominators of a step of one prompt."""
    return step_denominators(
        mode,
        token_counts=lengths,
        trajectory_ids=list(range(len(lengths))),
        group_indices=[0] * len(lengths),
        divisor=100.0 if mode in DIVIDED else None,
        alpha=alpha,
    )


def noise(lengths, mode, alpha=None):
    """Return the variance of the step's gradient over the square of its mean, if a token's gradient has variance 1.

    The gradient of a whole response has the mean 1 whatever its length, which is the model of arXiv 2509.07558.
    """
    weights = [1 / (len(lengths) * denominator) for denominator in one_group(lengths, mode, alpha).sample_denoms]
    return sum(w**2 * n for w, n in zip(weights, lengths, strict=True)) / sum(weights) ** 2


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=12))
def test_delta_l_has_the_least_variance_of_all_modes(lengths):
    least = noise(lengths, "delta_l", 1.0)
    others = [noise(lengths, mode) for mode in ("sample_mean", "prompt_mean", "token_mean", "constant")]
    others += [noise(lengths, "delta_l", alpha) for alpha in (0.0, 0.5, 0.75)]
    assert all(least <= other * (1 + DOUBLE_ERROR) for other in others)


def mean(lengths, mode, alpha=None):
    """Return the mean of the gradient in the same model."""
    return sum(1 / (len(lengths) * denominator) for denominator in one_group(lengths, mode, alpha).sample_denoms)


@pytest.mark.parametrize(
    ("name", "modes", "alpha", "scale"),
    [
        (
            "`constant`, `token_mean`, `prompt_mean`",
            {"constant": 1.0, "token_mean": 0.5, "prompt_mean": 0.5},
            None,
            None,
        ),
        ("`sample_mean`", {"sample_mean": 0.5}, None, "half"),
        ("`delta_l`, α = 0.75", {"delta_l": 1.0}, 0.75, "the same"),
        ("`delta_l`, α = 1", {"delta_l": 1.0}, 1.0, "the same"),
    ],
)
def test_the_table_of_variances_in_the_docs(name, modes, alpha, scale):
    docs = (Path(__file__).parents[3] / "docs" / "loss-aggregation.md").read_text()
    section = docs.partition("## Variance and bias by length")[2].partition("\n## ")[0]
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {name} | ")]
    _, _, variance, twice, _ = (cell.strip() for cell in row.split("|"))
    lengths = [100, 200, 400, 1100]
    for mode, factor in modes.items():
        assert f"{noise(lengths, mode, alpha):.1f}" == variance
        assert mean([2 * n for n in lengths], mode, alpha) == pytest.approx(factor * mean(lengths, mode, alpha))
    assert scale is None or twice == scale
