"""The reward of this run: answers of about 20 words that end with a sentence. ``python reward.py`` tests it."""

from collections.abc import Sequence

from miles.types.sample import Prompt, Sample

WORDS = 20


def score(samples: Sequence[Sample]) -> list[float]:
    """Return how near an answer is to its length, from 0 to 1; half of that if it ends within a sentence."""
    near = [max(0.0, 1 - abs(len(sample.response.split()) - WORDS) / WORDS) for sample in samples]
    ends = [sample.response.rstrip().endswith((".", "!", "?")) for sample in samples]
    return [share if is_whole else share / 2 for share, is_whole in zip(near, ends, strict=True)]


def test_score() -> None:
    """Write down the answers that you are afraid of."""
    answers = {"word " * 19 + "end.": 1, "word " * 20: 0.5, "word " * 10: 0.25, "": 0, "word " * 100: 0}
    assert score([Sample(Prompt("", ()), 0, response=answer) for answer in answers]) == [*answers.values()]


if __name__ == "__main__":
    test_score()
    print("test_score passed")
