"""The rules of advantage estimators and of the critic."""

import pytest

from miles.config.explain import explain, without_effect
from miles.objective import chosen as objective

PPO = "--advantage-estimator ppo"
BASELINE = "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages"
RETURNS = "--advantage-estimator reinforce_plus_plus --normalize-advantages"
VALUE = f"{PPO} --loss-type value_loss"
REFUSED = [
    ("--kl-coef 0.1", "--kl-coef 0.1: contradicts .*--use-kl-loss --kl-loss-coef"),
    (f"{PPO} --gamma 1.1", r"\[0, 1\]"),
    (f"{PPO} --lambd=-0.1", r"\[0, 1\]"),
    (f"{PPO} --value-clip 0", "--value-clip 0.0: .*above 0"),
    (f"{PPO} --kl-coef=-1", "at least 0"),
    (
        f"{PPO} --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1",
        "--kl-coef 0.1: alongside --kl-loss-coef 0.1 counts the KL twice",
    ),
    (f"{PPO} --use-opsm", "--use-opsm: drops sequences"),
    (f"{PPO} --critic-lr 0", "above 0"),
    (f"{PPO} --critic-lr 1e-7 --min-lr 5e-7", "--critic-lr 1e-07: is below --min-lr 5e-07"),
    (f"{PPO} --critic-lr-warmup-iters=-1", "at least 0"),
    (
        f"{PPO} --critic-lr-warmup-iters 10 --lr-decay-iters 10",
        "--critic-lr-warmup-iters 10: must be less than --lr-decay-iters 10",
    ),
    (f"{PPO} --num-critic-only-steps=-1", "at least 0"),
    (f"{PPO} --num-critic-only-steps 10", "leaves none of the --num-rollout 10 iterations"),
    ("--advantage-estimator reinforce_plus_plus", "add --normalize-advantages"),
    (
        f"{BASELINE} --disable-rewards-normalization",
        "_baseline.*; use --advantage-estimator reinforce_plus_plus, or drop",
    ),
    (f"{BASELINE} --n-samples-per-prompt 1", "every advantage is 0"),
    ("--loss-type value_loss", "--loss-type value_loss: trains a critic, .*add --advantage-estimator ppo"),
    (f"{VALUE} --loss-aggregation prompt_mean", "--loss-aggregation prompt_mean: would be ignored"),
    (f"{VALUE} --loss-agg-mode seq-mean-token-sum", "--loss-agg-mode seq-mean-token-sum: would be ignored"),
]


def objective_formula(settings):
    return objective.objective_formula(settings.loss, settings.step_shape)


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_refused(validated, flags, message):
    with pytest.raises(ValueError, match=message):
        validated(flags, "--rm-type" if "sft_loss" in flags else "")


ACCEPTED = [
    PPO,
    f"{PPO} --n-samples-per-prompt 1",
    f"{PPO} --gamma 0.99 --lambd 0.95 --kl-coef 0.01 --kl-loss-type k3 --ref-load some/model --normalize-advantages",
    f"{PPO} --use-kl-loss --kl-loss-coef 0.1",
    f"{PPO} --use-kl-loss --kl-coef 0.1",
    f"{PPO} --critic-lr 5e-6 --critic-lr-warmup-iters 3 --num-critic-only-steps 2 --lr 1e-6",
    f"{PPO} --loss-aggregation prompt_mean",
    f"{PPO} --train-backend megatron",
    f"{VALUE} --loss-aggregation token_mean --kl-coef 0.1 --value-clip 0.5",
    f"{VALUE} --lr 1e-5 --critic-lr-warmup-iters 3",
    f"{RETURNS} --gamma 0.9 --kl-coef 0.01 --n-samples-per-prompt 1",
    BASELINE,
    "--normalize-advantages",
    "--kl-coef 0.00",
]


@pytest.mark.parametrize("flags", ACCEPTED)
def test_accepted_and_explained(validated, flags):
    result = validated(flags)
    text = explain(result)
    assert objective_formula(result.settings).splitlines()[0] in text
    assert all(len(line) <= 112 for line in text.splitlines()) and "None" not in text


def test_the_formula_of_ppo(validated):
    formula = objective_formula(validated(f"{PPO} --gamma 0.99 --lambd 0.95 --value-clip 0.3 --kl-coef 0.02").settings)
    assert "(0.99 · 0.95)^k" in formula and "V_old ± 0.3" in formula and "- 0.02 KL_k1" in formula
    assert "reward - mean" not in formula and "whitened" not in formula
    assert "whitened" in objective_formula(validated(f"{PPO} --normalize-advantages").settings)


@pytest.mark.parametrize(
    ("flags", "some", "all_of_them"),
    [
        ("--lr-warmup-iters", 9, 10),
        ("--lr-warmup-fraction", 0.9, 0.96),
        ("--lr-decay-style constant --lr-warmup-fraction", 0.9, 1.0),
        (f"{PPO} --critic-lr-warmup-iters", 9, 10),
    ],
)
def test_a_run_that_is_all_warm_up_is_noted(validated, flags, some, all_of_them):
    assert not any("warm-up" in note for note in validated(f"{flags} {some}").surprises)
    (note,) = [note for note in validated(f"{flags} {all_of_them}").surprises if "warm-up" in note]
    assert note == f"{flags.split()[-1]} {all_of_them}: all of the run (10 optimizer steps) is warm-up"


def test_a_warm_up_may_take_all_steps_of_a_decay_that_is_none(validated):
    assert validated("--lr-decay-style constant --lr-warmup-fraction 1 --lr-decay-iters 5")


def test_the_critic_has_a_schedule_of_its_own(validated):
    settings = validated(
        f"{PPO} --critic-lr 5e-6 --lr-warmup-iters 7 --critic-lr-warmup-iters 3 --num-critic-only-steps 4 "
        "--num-steps-per-rollout 2"
    ).settings
    assert (settings.critic_optimizer.lr, settings.critic_optimizer.lr_warmup_iters) == (5e-6, 3)
    assert (settings.optimizer.lr, settings.optimizer.lr_warmup_iters) == (1e-6, 7)
    assert settings.policy_steps(20) == 20 - 4 * 2
    assert [settings.trains_policy(rollout) for rollout in (0, 3, 4)] == [False, False, True]
    assert not validated(VALUE).settings.trains_policy(9)


def test_an_idle_clip_is_said_to_be(validated):
    assert any("--value-clip" in line for line in without_effect(validated(PPO).settings))
    assert not any(
        "--value-clip" in line for line in without_effect(validated(f"{PPO} --num-steps-per-rollout 2").settings)
    )


def test_epochs_that_leave_the_policy_nothing_are_refused_when_the_prompts_are_counted(validated):
    settings = validated(f"{PPO} --num-epoch 1 --num-critic-only-steps 3", "--num-rollout").settings
    spent = 3 * settings.steps_per_iteration
    with pytest.raises(ValueError, match="--num-critic-only-steps 3: leaves none of the 3 iterations .*--num-epoch"):
        settings.policy_steps(spent)
    assert settings.policy_steps(spent + settings.steps_per_iteration) == settings.steps_per_iteration
