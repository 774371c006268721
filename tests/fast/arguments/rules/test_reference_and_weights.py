"""Rules of the reference that follows the policy, of weights that adapt, and of logits in fp32."""

import pytest

KL = "--use-kl-loss --kl-loss-coef 0.1"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--kl-target 0.1", "no KL is part of the reward or the loss"),
        ("--kl-horizon 5", "would be ignored without --kl-target"),
        (f"{KL} --kl-target 0", "must be a finite number above 0"),
        (f"{KL} --kl-target 0.1 --kl-horizon 6", "a step of 32 trajectories could make the weight negative"),
        (f"{KL} --kl-target 0.1 --kl-horizon 3 --num-steps-per-rollout 2", "give more than 3.2"),
        ("--entropy-coef-delta 0.1", "would be ignored without --entropy-target"),
        ("--entropy-target 0.2 --entropy-coef 3", "must be between --entropy-coef-min 0 and --entropy-coef-max 1"),
        ("--ref-update-interval 3", "would be ignored without --use-kl-loss"),
        ("--use-kl-loss --ref-update-interval 0", "must be a finite number of at least 1"),
        ("--use-kl-loss --ref-mixup-alpha 0.5", "would be ignored without --ref-update-interval"),
        ("--use-kl-loss --ref-update-interval 2 --ref-mixup-alpha 1.5", r"must be in [0, 1]"),
        ("--use-kl-loss --ref-update-interval 2 --ref-mixup-alpha 0", "must be a finite number above 0"),
        ("--use-kl-loss --ref-update-interval 2 --lora-rank 4", "the reference is the model without the adapter"),
        ("--fp32-lm-head", "without --bf16: everything is in fp32"),
    ],
)
def test_refused(refused, flags, sentence):
    (message,) = refused(flags)
    assert sentence in message


def test_a_reference_is_due_after_every_nth_iteration(validated):
    settings = validated("--use-kl-loss --ref-update-interval 3").settings
    assert [i for i in range(9) if settings.refreshes_reference(i)] == [2, 5, 8]
    assert not any(validated().settings.refreshes_reference(i) for i in range(9))
