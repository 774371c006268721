"""On-policy distillation: its flags, and its effect on advantages. tests/fast/training/fsdp has the gradient."""

import numpy as np
import pytest
from tolerance import FEW_ROUNDINGS

from miles.base.flags import Errors
from miles.objective.chosen import build_objective, check_objective
from miles.objective.registry import StepShape
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages

SERVERS = {"use_opd": True, "opd_teacher_urls": ("math=http://a:1/generate", "code=http://b:2")}


@pytest.mark.parametrize("estimator", ["grpo", "ppo", "reinforce_plus_plus"])
def test_the_kl_is_subtracted_from_any_advantage_and_not_from_returns(estimator):
    mask, gap = np.array([1.0, 0.0, 1.0], np.float32), np.array([0.5, 9.0, -2.0], np.float32)
    values = np.array([0.1, 0.0, 0.2], np.float32) if estimator == "ppo" else None

    def step(**flags):
        loss = LossArguments(advantage_estimator=estimator, **flags)
        return token_advantages(build_objective(loss), [SampleTokens(0, 1.5, mask, values, None, gap)])

    plain, distilled = step(), step(use_opd=True, opd_kl_coef=0.25)
    np.testing.assert_allclose(distilled.advantages[0], plain.advantages[0] - 0.25 * gap * mask, rtol=FEW_ROUNDINGS)
    assert distilled.metrics["opd_kl"].value == pytest.approx((0.5 - 2.0) / 2)
    if values is not None:
        np.testing.assert_array_equal(distilled.returns[0], plain.returns[0])


def test_every_sample_can_have_a_gradient():
    loss = LossArguments(use_opd=True)
    assert build_objective(loss).estimates_by_token and not build_objective(loss).normalizes_rewards
    assert build_objective(loss).samples_with_gradient([0.0, 1.0]) == [True, True]
    needs = build_objective(loss).advantages_need
    assert needs.old_log_probs and needs.teacher_log_probs and not needs.ref_log_probs


def test_teachers_are_named_or_single():
    served = LossArguments(**SERVERS)
    assert served.teacher_is_served and served.teachers == {"math": "http://a:1", "code": "http://b:2"}
    alone = LossArguments(use_opd=True, opd_teacher_urls=("http://h:1/generate?x=1=2",))
    assert list(alone.teachers) == [""]
    assert LossArguments(use_opd=True).teacher_is_loaded


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"use_opd": True, "loss_type": "sft_loss"}, "--use-opd: contradicts --loss-type sft_loss"),
        ({"use_opd": True, "use_opsm": True}, "--use-opsm: drops sequences of negative advantage"),
        ({"use_opd": True, "opd_type": "server"}, "--opd-type server: needs the teacher's address"),
        (
            {"use_opd": True, "opd_teacher_urls": ("user:hunter2@h:1",)},
            "urls (hidden)@h:1: address 1 of 1 begins with neither",
        ),
        ({"use_opd": True, "opd_teacher_urls": ("http://a", "http://b")}, "several teachers need a name each"),
    ],
)
def test_each_fault_is_reported(flags, words):
    errors = Errors()
    check_objective(LossArguments(**flags), StepShape(8, 4), errors)
    assert any(words in message for message in errors.messages), errors.messages
