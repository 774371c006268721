"""``--rm-type repetition``: a penalty for saying the same again."""

from collections.abc import Sequence
from dataclasses import dataclass

from miles.base.flags import flag
from miles.tasks.rewards.base import Reward, Rewards
from miles.types.sample import Sample


@dataclass(frozen=True)
class RepetitionFlags:
    """repetition: the flags of ``--rm-type repetition``."""

    repetition_ngram: int = flag(4, "tokens in a row that count as a repetition if they come again", at_least=1)


class Repetition(Reward[RepetitionFlags]):
    """Minus the share of n-grams that came before: ``distinct / all - 1``, from 0 to almost -1.

    The n-grams are of response tokens, so that this is the same for every language. A response shorter than n tokens
    gets 0. The weight of the reward states how much an answer loses that only repeats itself.
    """

    name = "repetition"
    summary = "minus the share of repeated n-grams of tokens (a penalty)"
    needs_label = False
    own_flags = RepetitionFlags

    def score(self, samples: Sequence[Sample], flags: RepetitionFlags) -> Rewards:
        """Count distinct n-grams."""
        return [0.0 - repeated_share(sample.response_ids, flags.repetition_ngram) for sample in samples]


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """Return the share of n-grams that came before; 0 for fewer than n tokens.

    >>> repeated_share([1, 2, 1, 2, 1, 2], 2)
    0.6
    """
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
