"""``--rm-type exact_match``: whether the answer is the label, as text or as SQuAD compares them (arXiv 1606.05250)."""

from collections.abc import Sequence
from dataclasses import dataclass

from miles.base.flags import flag
from miles.tasks.rewards.answer_text import final_answer, reference_texts
from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.built_in.f1 import words
from miles.types.sample import Prompt, Sample


@dataclass(frozen=True)
class ExactMatchFlags:
    """exact_match: the flags of ``--rm-type exact_match``."""

    exact_match_squad: bool = flag(
        False,
        "--rm-type exact_match compares the final answer as question answering does: without case, punctuation and the "
        "articles a, an and the",
    )


class ExactMatch(Reward[ExactMatchFlags]):
    """1 if response and label are the same text (white space around both aside), else 0.

    Several labels, as a list, are alternatives. With ``--exact-match-squad`` this is the exact match of SQuAD: the
    content of ``<answer>`` if there is one, else what follows the reasoning, has the words of a label in their order;
    case, ASCII punctuation, and the articles a, an and the do not count.
    """

    name = "exact_match"
    summary = "1 if the response is the label"
    data = "label: text, a number, or a list of them"
    own_flags = ExactMatchFlags

    def check_prompt(self, prompt: Prompt, flags: ExactMatchFlags) -> None:
        """Check the labels."""
        reference_texts(prompt, self.name)

    def score(self, samples: Sequence[Sample], flags: ExactMatchFlags) -> Rewards:
        """Compare texts."""
        is_match = _is_squad_match if flags.exact_match_squad else _is_match
        return [float(is_match(s.response, reference_texts(s.prompt, self.name))) for s in samples]


def _is_match(response: str, labels: Sequence[str]) -> bool:
    return response.strip() in labels


def _is_squad_match(response: str, labels: Sequence[str]) -> bool:
    answer = words(final_answer(response))
    return any(answer == words(label) for label in labels)
