"""Scripts that distil a teacher with an estimator of that name, or with ``--use-opd``, mean the same here."""

import pytest

THEIRS = "--custom-rm-path slime.rollout.on_policy_distillation.reward_func --rm-url http://h:1/generate"
OURS = "--use-opd --opd-teacher-urls http://h:1/generate --custom-rm-path miles.tasks.rewards.built_in.zero:zero"
ESTIMATOR = "--advantage-estimator on_policy_distillation"


@pytest.mark.parametrize(
    "flags",
    [
        f"{THEIRS} {ESTIMATOR}",
        f"{THEIRS} --advantage-estimator=on_policy_distillation --opd-kl-coef 1.0",
        f"{THEIRS} --use-opd --opd-type sglang",
        f"{THEIRS} --use-opd",
    ],
)
def test_a_teacher_in_servers(accepted, flags):
    expected = accepted(OURS, without="--rm-type").settings
    result = accepted(flags, without="--rm-type")
    assert result.settings.reward == expected.reward
    assert (result.settings.loss.teachers, result.settings.loss.teacher_is_served) == ({"": "http://h:1"}, True)
    assert result.settings.loss.advantage_estimator == "grpo", "whose advantages are 0, as the rewards are"
    assert any(note.written.startswith("--rm-url") for note in result.accepted)


def test_a_teacher_in_the_trainer(accepted):
    loss = accepted(f"{ESTIMATOR} --rm-type zero --opd-teacher-load some/teacher", without="--rm-type").settings.loss
    assert loss.teacher_is_loaded and loss.opd_kl_coef == 1


@pytest.mark.parametrize("flags", [ESTIMATOR, f"{ESTIMATOR} --rm-type zero --opd-kl-coef 0.5"])
def test_beside_other_rewards_or_weights_it_is_refused(refusals, flags):
    messages = refusals(f"{flags} --opd-teacher-load some/teacher")
    (message,) = (message for message in messages if message.startswith("--advantage-estimator"))
    assert message.endswith(
        "no such choice; give --use-opd, which works alongside any estimator, and --rm-type zero if "
        "nothing else is rewarded"
    )


def test_an_address_that_only_their_reward_asks(refusals):
    (message,) = refusals(THEIRS, without="--rm-type")
    assert message.startswith("--rm-url http://h:1/generate: --custom-rm-path slime.rollout.on_policy_distillation")
    assert message.endswith("the command distils none; add --use-opd, or drop both and give --rm-type")


def test_one_answer_per_prompt_is_enough(accepted):
    accepted(f"{OURS} --n-samples-per-prompt 1", without="--rm-type --n-samples-per-prompt")
