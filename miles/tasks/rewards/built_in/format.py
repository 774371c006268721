"""``--rm-type format``: whether the response has the form ``<think>…</think><answer>…</answer>``."""

from collections.abc import Sequence

from miles.tasks.rewards.base import Reward, Rewards
from miles.types.sample import Sample

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK, _END_THINK, _ANSWER, _END_ANSWER = TAGS


class Format(Reward[None]):
    """1 if the response is ``<think>…</think>`` and then ``<answer>…</answer>``, each once and not empty, else 0.

    This is the format reward of DeepSeek-R1-Zero (2501.12948). ``<think>`` may be missing, since chat templates often
    end the prompt with it. White space is allowed around the parts and nothing else is, so that a model gains nothing
    by repeating tags.
    """

    name = "format"
    summary = "1 if the response is <think>…</think><answer>…</answer>, else 0"
    needs_label = False

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Look for the tags."""
        return [float(has_format(sample.response)) for sample in samples]


def has_format(response: str) -> bool:
    """Return whether ``response`` has the form."""
    text = response.strip().removeprefix(_THINK)
    if _THINK in text or any(text.count(tag) != 1 for tag in TAGS[1:]):
        return False
    thought, _, rest = text.partition(_END_THINK)
    rest = rest.strip()
    if not (rest.startswith(_ANSWER) and rest.endswith(_END_ANSWER)):
        return False
    return bool(thought.strip() and rest.removeprefix(_ANSWER).removesuffix(_END_ANSWER).strip())
