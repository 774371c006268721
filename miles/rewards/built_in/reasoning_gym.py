"""``--rm-type reasoning_gym``: the task's own scorer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym as gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.utils import extract_answer

from miles.rewards.subprocess_call import subprocess_call
from miles.sample import Sample

SECONDS = 30.0  # of wall time per sample, including making the task's data set, once per process


def reasoning_gym(samples: Sequence[Sample]) -> list[float]:
    """Return what the scorer of the prompt's task gives, mostly from 0 to 1 and in parts for a part of the answer.

    The answer is the content of the last ``<answer>`` element of the response, else the whole stripped response.
    Prompts come from ``--prompt-data reasoning_gym:TASK``, which keeps the task's entry in their metadata. Raises
    ``ValueError`` for prompts without one, ``SubprocessCallTimeout`` for a scorer that takes more than ``SECONDS``.
    """
    return [_score(s) for s in samples]


def _score(sample: Sample) -> float:
    origin = sample.prompt.metadata.get("reasoning_gym")
    if origin is None:
        raise ValueError(
            f"--rm-type reasoning_gym: the prompt {sample.prompt.source} is no reasoning_gym entry; give "
            f"--prompt-data reasoning_gym:TASK, or another --rm-type"
        )
    tagged = extract_answer(sample.response)
    answer = sample.response.strip() if tagged is None else tagged
    options = json.dumps(origin["options"], sort_keys=True)
    scored: float = subprocess_call(score_answer, origin["task"], options, answer, origin["entry"], seconds=SECONDS)
    return scored


def score_answer(task: str, options: str, answer: str, entry: dict[str, Any]) -> float:
    """``answer`` as the task scores it; ``options`` is a JSON object of the task's settings."""
    return float(_dataset(task, options).score_answer(answer, entry))


@lru_cache
def _dataset(task: str, options: str) -> ProceduralDataset:
    # Scorers read settings (the precision asked for, the size of a board), so the data set must be the prompt's own.
    return gym.create_dataset(task, **json.loads(options))
