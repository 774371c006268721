import pytest

from miles.tasks.rewards.built_in import REWARDS

gemma_math = REWARDS["gemma_math"]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"<|channel>thought \boxed{3}<channel|>so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"no thinking: \boxed{42}", 42, 1.0),
        (r"a<channel|>b \boxed{42}<channel|> \boxed{7}", "7", 1.0),
        (r"\boxed{42}<channel|>the answer is 42", "42", 0.0),  # boxed in the thinking only
        (r"<think>a</think> \boxed{4", "4", 0.0),  # cut off
        ("", "42", 0.0),
    ],
)
def test_only_the_last_box_after_the_thinking_counts(make_sample, response, label, reward):
    assert gemma_math([make_sample(response, label)]) == [reward]


def test_unreadable_label(make_sample):
    with pytest.raises(ValueError, match="--rm-type gemma_math: .*prompts.jsonl:17"):
        gemma_math([make_sample(r"\boxed{7}", "  ")])
