"""--rollout-data-postprocess-path: the columns that the function sees, those it may change, and those it may not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from miles.batch.convert import postprocessed
from miles.objective.chosen import build_objective
from miles.objective.hooks import check_hooks
from miles.objective.settings import LossArguments
from miles.training.scoring import needs_of
from miles.types.train_batch import TrainBatch, TrainShard

ARGS = SimpleNamespace(eps_clip=0.5)
FUNCTIONS = """
import torch
SEEN = []

def look(args):
    SEEN.append(args.eps_clip)

def halve(args, data):
    data["advantages"] = [advantages * args.eps_clip for advantages in data["advantages"]]

def by_iteration(args, rollout_id, data):
    for advantages, log_probs in zip(data["advantages"], data["log_probs"]):
        advantages[0] = rollout_id
        log_probs -= 1

def mask(args, data):
    data["loss_masks"][0][0] = 0

def cut(args, data):
    data["advantages"][1] = data["advantages"][1][:-1]

def not_finite(args, data):
    data["advantages"][0][0] = float("nan")

def adds(args, data):
    data["mine"] = [0] * len(data["tokens"])

def removes(args, data):
    del data["log_probs"]

def four(a, b, c, d):
    pass
"""


def shard(rewards: list[float], **fields) -> TrainShard:
    """Return samples with a prompt of two tokens and responses of 2, 3, … tokens."""
    lengths = [2 + i for i in range(len(rewards))]
    arrays = [np.full(n, -0.5, np.float32) for n in lengths]
    for array in arrays:
        array.flags.writeable = False  # as Ray's memory is
    batch = TrainBatch(
        tokens=[np.arange(n + 2) for n in lengths],
        response_lengths=lengths,
        loss_masks=[np.ones(n, np.float32) for n in lengths],
        rollout_log_probs=arrays,
        rewards=rewards,
        sample_denoms=[1.0] * len(lengths),
        trajectory_token_counts=[float(n) for n in lengths],
        group_indices=[0] * len(lengths),
        trajectory_ids=list(range(len(lengths))),
        position_in_step=list(range(len(lengths))),
        num_trajectories=len(lengths),
        num_loss_tokens=sum(lengths),
        expected_loss_mass=1.0,
        old_log_probs=arrays,
        **fields,
    )
    return TrainShard(batch, [])


@pytest.fixture
def function(tmp_path, monkeypatch):
    """The path of a function of ``FUNCTIONS``."""
    (tmp_path / f"post_{tmp_path.name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: f"post_{tmp_path.name}:{name}"


def test_advantages_of_samples_become_those_of_tokens_and_follow_the_function(function):
    """Two steps: each gets its own samples back."""
    first, second = postprocessed([shard([1.0, -3.0]), shard([4.0])], function("halve"), ARGS, 7, True)
    assert [column.tolist() for column in first.batch.advantages] == [[0.5] * 2, [-1.5] * 3]
    assert [column.tolist() for column in second.batch.advantages] == [[2.0] * 2]
    assert first.batch.rewards == [1.0, -3.0] and first.batch.advantages[0].dtype == np.float32


def test_what_is_changed_in_place_counts_and_the_iteration_is_told(function):
    original = shard([1.0], advantages=[np.array([3.0, 4.0], np.float32)])
    (processed,) = postprocessed([original], function("by_iteration"), ARGS, 7, True)
    assert processed.batch.advantages[0].tolist() == [7.0, 4.0]
    assert processed.batch.old_log_probs[0].tolist() == [-1.5, -1.5]
    assert original.batch.advantages[0].tolist() == [3.0, 4.0], "a step that is given to several ranks is not theirs"


def test_a_function_of_the_flags_alone_is_called(function):
    (processed,) = postprocessed([shard([1.0])], function("look"), ARGS, 0, True)
    module = __import__(function("look").partition(":")[0])
    assert module.SEEN == [0.5] and processed.batch.advantages[0].tolist() == [1.0, 1.0]


def test_without_advantages_there_are_none(function):
    with pytest.raises(KeyError, match="advantages"):
        postprocessed([shard([1.0])], function("halve"), ARGS, 0, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mask", "changed loss_masks, which the denominators of the step were computed from; set advantages to 0"),
        ("cut", "gave advantages other lengths"),
        ("not_finite", "gave advantages numbers that are not finite"),
        ("adds", "added mine, which nothing reads"),
        ("removes", "removed log_probs; keep"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(function, name, message):
    with pytest.raises(ValueError, match=f"--rollout-data-postprocess-path .*{name}: {message}"):
        postprocessed([shard([1.0, 2.0])], function(name), ARGS, 0, True)


def test_its_signature_is_checked_before_the_run(function):
    with pytest.raises(ValueError, match="--rollout-data-postprocess-path .*must take args, rollout_id, rollout_data"):
        check_hooks(LossArguments(rollout_data_postprocess_path=function("four")), None)


def test_log_probs_are_scored_for_it_and_every_sample_is_trained_on():
    """The function may give an advantage to samples that have none."""
    plain = build_objective(LossArguments())
    watched = build_objective(LossArguments(rollout_data_postprocess_path="mine:edit"))
    assert not needs_of(plain, 0, True).old_log_probs and needs_of(watched, 0, True).old_log_probs
    assert plain.samples_with_gradient([0.0, 1.0]) == [False, True]
    assert watched.samples_with_gradient([0.0, 1.0]) == [True, True]
