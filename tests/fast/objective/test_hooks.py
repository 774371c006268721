"""The user's own reducer: both forms, found by their signature, and the errors of neither."""

from __future__ import annotations

import pytest
import torch

from miles.objective.aggregation import get_pg_loss_reducer
from miles.objective.settings import LossArguments

REDUCERS = """
import torch

def first_token_only(inputs):
    weights = torch.cat([torch.eye(1, n)[0] for n in inputs.response_lengths]) * inputs.loss_mask
    assert [len(m) for m in inputs.loss_masks] == list(inputs.response_lengths)
    return lambda losses: torch.dot(losses, weights / inputs.num_trajectories)

def sample_means(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    assert [t - r for t, r in zip(total_lengths, response_lengths)] == [2] * len(response_lengths)
    def reduce(losses):
        parts = zip(losses.split(response_lengths), loss_masks)
        return sum((x * m).sum() / (1 if calculate_per_token_loss else m.sum().clamp(min=1)) for x, m in parts)
    return reduce

def two_arguments(a, b):
    return torch.sum

def no_reducer(inputs):
    return 3

def vector(inputs):
    return lambda losses: losses
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """Settings that name a function of ``REDUCERS``, in a module only this test can see."""
    module = f"reducers_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(REDUCERS)
    monkeypatch.syspath_prepend(tmp_path)

    def settings(name: str, **given) -> LossArguments:
        return LossArguments(custom_pg_loss_reducer_function_path=f"{module}.{name}", **given)

    return settings


def test_the_users_own_reducer_comes_first(make_micro, custom):
    micro = make_micro([[1, 1], [1, 0, 1]], num_trajectories=4)
    losses = torch.arange(1.0, 6.0, requires_grad=True)
    value = get_pg_loss_reducer(custom("first_token_only"), micro)(losses)
    value.backward()
    assert value.item() == pytest.approx((1 + 3) / 4)
    assert losses.grad is not None and losses.grad.tolist() == [0.25, 0, 0.25, 0, 0]


@pytest.mark.parametrize("per_token", [False, True])
def test_the_four_argument_form_is_divided_by_the_steps_count(make_micro, custom, per_token):
    micro = make_micro([[1, 1], [1, 0, 1]], num_trajectories=4, num_loss_tokens=10)
    losses = torch.arange(1.0, 6.0)
    mine = get_pg_loss_reducer(custom("sample_means", calculate_per_token_loss=per_token), micro)(losses)
    ours = get_pg_loss_reducer(LossArguments(calculate_per_token_loss=per_token), micro)(losses)
    assert mine.item() == pytest.approx(ours.item())


def test_an_empty_micro_batch_is_zero_and_has_a_graph(make_micro, custom):
    losses = torch.zeros(0, requires_grad=True)
    value = get_pg_loss_reducer(custom("first_token_only"), make_micro([], total_lengths=(1,)))(losses)
    value.backward()
    assert value.item() == 0.0 and losses.grad is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [("two_arguments", "signature is"), ("no_reducer", "returned int"), ("vector", "shape"), ("absent", "no function")],
)
def test_wrong_functions_are_named(make_micro, custom, name, message):
    with pytest.raises(
        ValueError, match=f"--custom-pg-loss-reducer-function-path .*{name}.*{message}|{message}.*{name}"
    ):
        get_pg_loss_reducer(custom(name), make_micro([[1, 1]]))(torch.ones(2))
