import pytest

from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.built_in.deepscaler import boxed_answer

deepscaler = REWARDS["deepscaler"]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"<think>maybe \boxed{3}</think> so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"one###Response \boxed{42}", 42, 1.0),
        (r"a</think>b</think> first \boxed{7}, no, \boxed{42}", "42", 1.0),
        (r"a</think> \boxed{42}, no, \boxed{7}", "42", 0.0),
        (r"<think>\boxed{42}</think> the answer is 42", "42", 0.0),  # not boxed
        (r"\boxed{42}", "42", 0.0),  # the reasoning does not end
        (r"</think> \boxed{4", "4", 0.0),  # cut off
        ("", "42", 0.0),
    ],
)
def test_only_the_last_box_after_the_reasoning_counts(make_sample, response, label, reward):
    assert deepscaler([make_sample(response, label)]) == [reward]


@pytest.mark.parametrize("content", [r"\frac{\sqrt{2}}{2}", r"\left\{1, 2\right.", r"a\\b\}", "", "{}"])
@pytest.mark.parametrize("box", [r"\boxed{", r"\fbox{", r"\boxed {"])
def test_boxes_are_nested_and_escaped_braces_are_text(content, box):
    assert boxed_answer(rf"</think>\boxed{{1}} {box}{content}}} and {{so on}}") == content


def test_unreadable_label(make_sample):
    with pytest.raises(ValueError, match="--rm-type deepscaler: .*prompts.jsonl:17"):
        deepscaler([make_sample(r"</think> \boxed{7}", "  ")])
