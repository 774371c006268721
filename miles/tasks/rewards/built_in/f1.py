"""``--rm-type f1``: the overlap of words between answer and label, as SQuAD scores it (arXiv 1606.05250)."""

import string
from collections import Counter
from collections.abc import Sequence

from miles.tasks.rewards.answer_text import final_answer, reference_texts
from miles.tasks.rewards.base import Reward, Rewards
from miles.types.sample import Prompt, Sample

_ARTICLES = {"a", "an", "the"}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class F1(Reward[None]):
    """F1 of the words of answer and label: 2 P R / (P + R), with P and R the shares of words in common.

    Case, ASCII punctuation, and the articles a, an and the do not count, unless a text has nothing else; a word that is
    repeated counts as often as the other text has it. Several labels, as a list, are alternatives: the best counts. The
    answer is the content of ``<answer>`` if there is one, else what follows the reasoning. For yes-or-no questions
    prefer ``exact_match``.
    """

    name = "f1"
    summary = "F1 of the words of answer and label, as in question answering"
    data = "label: text, a number, or a list of them"

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the labels."""
        reference_texts(prompt, self.name)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare words; the best of the labels counts."""
        return [max(f1(final_answer(s.response), label) for label in reference_texts(s.prompt, "f1")) for s in samples]


def f1(answer: str, label: str) -> float:
    """Return the F1 of two texts.

    >>> f1("The Eiffel Tower, Paris", "Eiffel tower")
    0.8
    """
    actual, wanted = Counter(words(answer)), Counter(words(label))
    if not actual or not wanted:
        return float(actual == wanted)
    common = (actual & wanted).total()
    return 2 * common / (actual.total() + wanted.total())


def words(text: str) -> list[str]:
    """Return the words that SQuAD compares; all of a text that has articles or punctuation alone.

    If such a text had no words, an empty answer to the label "A" or "%" would be right.

    >>> words("The Eiffel Tower."), words("A"), words("")
    (['eiffel', 'tower'], ['a'], [])
    """
    tokens = text.lower().translate(_NO_PUNCTUATION).split()
    return [word for word in tokens if word not in _ARTICLES] or tokens or text.lower().split()
