"""A part of the reward of this run: the form of the answer; ``python_code`` runs the tests of the row.

``python reward.py`` tests it.
"""

import re
from collections.abc import Sequence

from miles.types.sample import Prompt, Sample


def score(samples: Sequence[Sample]) -> list[float]:
    """Return 1 for an answer with exactly one block of Python code, else 0."""
    return [float(len(re.findall(r"```python\n.*?```", sample.response, re.DOTALL)) == 1) for sample in samples]


def test_score() -> None:
    """Write down the answers that you are afraid of."""
    answers = {"```python\nx = 1\n```": 1, "x = 1": 0, "```python\n```\n```python\n```": 0}
    assert score([Sample(Prompt("", ()), 0, response=answer) for answer in answers]) == [*answers.values()]


if __name__ == "__main__":
    test_score()
    print("test_score passed")
