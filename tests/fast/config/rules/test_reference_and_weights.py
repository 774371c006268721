"""Rules of the reference that follows the policy, of weights that adapt, and of logits in fp32."""

import pytest

from miles.config.explain import explain
from tests.fast.support.rows import rows

KL = "--use-kl-loss --kl-loss-coef 0.1"


@pytest.mark.parametrize(("flags", "sentence"), rows(__file__, "test_refused"))
def test_refused(refused, flags, sentence):
    (message,) = refused(flags)
    assert sentence in message


def test_what_is_set_is_explained(validated):
    text = explain(
        validated(f"{KL} --ref-update-interval 5 --ref-mixup-alpha 0.6 --kl-target 0.1 --bf16 --fp32-lm-head")
    )
    assert "reference  becomes 0.6 policy + 0.4 reference after every 5 iterations" in text
    assert "kl_loss_coef <- kl_loss_coef (1 + clip(KL / 0.1 - 1, -0.2, 0.2) N / 10000)" in text
    assert "fp32 logits" in text
    assert "c +- 0.005 in [0, 1]" in explain(validated("--entropy-target 0.2"))
    mix = "--prompt-mix a reasoning_gym:x b reasoning_gym:y --prompt-mix-weights 3 1 --curriculum-path here:f"
    text = explain(validated(mix, without="--prompt-data"))
    assert "prompts    a 0.75, b 0.25 of the draws" in text and "by here:f" in text


def test_engines_that_run_already_are_not_told_of_the_head(validated):
    flags = "--rollout-engine sglang --rollout-external --rollout-external-engine-addrs h:1 --bf16 --fp32-lm-head"
    assert any("--enable-fp32-lm-head" in note for note in validated(flags).notes)


def test_a_reference_is_due_after_every_nth_iteration(validated):
    settings = validated("--use-kl-loss --ref-update-interval 3").settings
    assert [i for i in range(9) if settings.refreshes_reference(i)] == [2, 5, 8]
    assert not any(validated().settings.refreshes_reference(i) for i in range(9))
