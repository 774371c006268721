"""``--environment reasoning_gym[:attempts=N]``: a task of reasoning_gym, with several attempts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from miles.base.text import InputError
from miles.base.user_code import run_blocking
from miles.tasks.environments.base import Environment, EnvironmentKind, EnvironmentMaker, Message, opening
from miles.tasks.rewards.built_in.reasoning_gym import score_alone
from miles.types.sample import Prompt, Sample

TRY_AGAIN = "That is not right. Try again."


class ReasoningGymEnvironment(EnvironmentKind):
    """Prompts come from ``--prompt-data reasoning_gym:TASK``. The reward is the task's score of the last answer.

    After an answer that scores less than 1, the model is asked to try again, up to ``attempts`` answers in all. With
    one attempt it is what ``--rm-type reasoning_gym`` is without an environment.
    """

    name = "reasoning_gym"
    summary = "a task of reasoning_gym, with attempts=N; the last attempt counts"
    options = {"attempts": 1}

    def maker(self, options: Mapping[str, Any]) -> EnvironmentMaker:
        """Return the maker of a row's environment."""
        attempts = options["attempts"]
        if not isinstance(attempts, int) or isinstance(attempts, bool) or attempts < 1:
            raise InputError(f"--environment reasoning_gym: attempts={attempts} must be a whole number from 1 on")
        return partial(Attempts, attempts=attempts)


class Attempts(Environment):
    """Up to ``attempts`` answers to one question."""

    def __init__(self, prompt: Prompt, attempts: int) -> None:
        self._prompt = prompt
        self._left = attempts
        self._score = 0.0

    async def reset(self) -> Sequence[Message]:
        """Ask the question."""
        return opening(self._prompt)

    async def step(self, answer: Message) -> Sequence[Message]:
        """Score an answer, by the task's scorer in a separate process."""
        sample = Sample(self._prompt, group_index=-1, response=str(answer["content"] or ""))
        self._score = await run_blocking(score_alone, sample)
        self._left -= 1
        return () if self._score >= 1 or self._left == 0 else [{"role": "user", "content": TRY_AGAIN}]

    async def reward(self) -> float:
        """Return the score of the last answer."""
        return self._score
