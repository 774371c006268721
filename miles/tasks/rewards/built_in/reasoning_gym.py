"""``--rm-type reasoning_gym``: the task's own scorer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any

from miles.tasks.rewards.base import Reward, Rewards, log_no_verdict
from miles.tasks.rewards.subprocess_call import in_parallel, limit_time, subprocess_call
from miles.types.sample import Sample

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

SLOW_IMPORTS = ("reasoning_gym",)  # subprocess_call imports them before the time starts
SECONDS = 1.0  # of processor time per sample
SECONDS_TO_PREPARE = 60.0  # for making the task's data set, once per process


class PreparationError(Exception):
    """The task's data set cannot be made, and so could not be made for any other answer."""


class ReasoningGym(Reward[None]):
    """The score by the scorer of the prompt's task, mostly from 0 to 1 and in parts for a part of the answer.

    The answer is the content of the last ``<answer>`` element of the response, else the whole stripped response.
    Prompts come from ``--prompt-data reasoning_gym:TASK``, which keeps the task's entry in their metadata. An answer on
    which the scorer takes more than ``SECONDS``, raises or dies is logged and scored 0.
    """

    name = "reasoning_gym"
    summary = "what the scorer of the prompt's reasoning_gym task gives"
    data = "metadata that `--prompt-data reasoning_gym:TASK` makes"
    needs_label = False
    limit = f"{SECONDS:g} s"

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Call the task's scorer."""
        return in_parallel(score_alone, samples)


def score_alone(sample: Sample) -> float:
    """Return the score of one sample, by the scorer in a separate process.

    Raises:
        ValueError: The prompt is no task of reasoning_gym.
    """
    origin = sample.prompt.metadata.get("reasoning_gym")
    if origin is None:
        raise ValueError(
            f"--rm-type reasoning_gym: the prompt {sample.prompt.source} is no reasoning_gym entry; give "
            f"--prompt-data reasoning_gym:TASK, or another --rm-type"
        )
    options = json.dumps(origin["options"], sort_keys=True)
    try:
        scored: float = subprocess_call(
            score_response, origin["task"], options, sample.response, origin["entry"], seconds=SECONDS
        )
    except PreparationError:
        raise
    except Exception as error:  # scorers read model output in their own ways; a timeout, a crash
        log_no_verdict("reasoning_gym", sample, error)
        return 0.0
    if not isfinite(scored):
        log_no_verdict("reasoning_gym", sample, ValueError(f"the scorer returned {scored}"))
        return 0.0
    return scored


def score_response(task: str, options: str, response: str, entry: dict[str, Any]) -> float:
    """Return the task's score of the answer in ``response``; ``options`` is a JSON object of the task's settings.

    The answer is searched for here, in the child process: the library's pattern takes quadratic time on tags that are
    not closed, and no other thread runs meanwhile.

    Raises:
        PreparationError: The task makes no data set of these options, for any answer.
    """
    from reasoning_gym.utils import extract_answer

    limit_time(SECONDS_TO_PREPARE)
    try:
        dataset = _dataset(task, options)
    except Exception as error:
        raise PreparationError(f"_dataset raised {type(error).__name__}: {error}") from error
    limit_time(SECONDS)
    tagged = extract_answer(response)
    return float(dataset.score_answer(response.strip() if tagged is None else tagged, entry))


@lru_cache
def _dataset(task: str, options: str) -> ProceduralDataset:
    # Scorers read settings (the precision asked for, the size of a board), so the data set must be the prompt's own.
    import reasoning_gym as gym

    return gym.create_dataset(task, **json.loads(options))
