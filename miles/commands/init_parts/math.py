"""The reward of this run: an answer is right if its last number is. ``python reward.py`` tests it."""

import re
from collections.abc import Sequence

from miles.types.sample import Prompt, Sample


def score(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for an answer whose last number is the label of its prompt, else 0."""
    numbers = [re.findall(r"-?\d+", sample.response) for sample in samples]
    return [float(matches[-1:] == [str(sample.label)]) for matches, sample in zip(numbers, samples, strict=True)]


def test_score() -> None:
    """Write down the answers that you are afraid of."""
    answers = {"3 * 4 = 12.": 1, "12? No, 13": 0, "I do not know": 0}
    prompt = Prompt("How much is 3 * 4?", (), label="12")
    assert score([Sample(prompt, 0, response=answer) for answer in answers]) == [*answers.values()]


if __name__ == "__main__":
    test_score()
    print("test_score passed")
