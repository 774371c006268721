"""The protocol of reward functions, and the base of the built-in ones."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from miles.base.choices import Choice, F
from miles.base.text import InputError, one_line
from miles.tasks.rewards.subprocess_call import SubprocessCallTimeout, SubprocessDied, in_parallel
from miles.types.sample import Prompt, Sample

if TYPE_CHECKING:
    from miles.base.flags import Errors


class NotAReward(str):
    """Why a sample has no reward: in the list that a reward function returns, instead of the number."""


LARGEST_REWARD = 1e30  # sums of such rewards are finite, also in 32 bits


def as_reward(value: Any) -> float | NotAReward:
    """Return what ``float`` makes of a number, such as a tensor with one element; else the fault of the value."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:  # a __float__ of the user's
        number = math.nan
    if abs(number) <= LARGEST_REWARD:
        return number
    why = "whose sums overflow" if math.isfinite(number) else "which is not a finite number (a float, say)"
    return NotAReward(f"returned {abbreviated(value)}, {why}")


def abbreviated(value: Any) -> str:
    """Return type and start of a value of the user's, for a message."""
    try:
        # The start of a text or list that is long: its whole repr may be far longer than the memory.
        text = repr(value[:80] if isinstance(value, str | bytes | list | tuple) else value)
    except Exception as error:  # a __repr__ of the user's
        text = f"(its repr raises {type(error).__name__})"
    return one_line(f"{type(value).__name__} {text}", 100)


class RewardSum(float):
    """The weighted sum of several rewards, which remembers its parts.

    Attributes:
        parts: Each reward by its name, before it is weighted.
    """

    parts: Mapping[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float]) -> RewardSum:
        """Return ``total`` with its ``parts``."""
        self = super().__new__(cls, total)
        self.parts = parts
        return self


Rewards = Sequence[float | NotAReward]


class RewardFunction(Protocol):
    """Scores a batch of generated samples: one number per sample, in order. May await a server or a subprocess."""

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return one finite number per sample, in order; ``NotAReward`` for a sample that cannot be scored."""


class Reward(Choice[F]):
    """A reward that ``--rm-type`` names. Objects have no state; ``flags`` are an object of its dataclass ``own_flags``.

    Each reward bounds the cost of an answer: work that could take more than linear time runs in ``subprocess_call``,
    under its limits.

    Attributes:
        data: The parts of a prompt's row that it needs, in words; empty for nothing.
        limit: The time that an answer may take, in words; empty for linear time.
        needs_label: Whether a row without a label cannot be scored.
        instead_of_label: The flag that replaces the label, as a field.
        libraries: Modules that a plain install lacks, each as ``module with pip install NAME``.
        shared_limits: Fields of its flags that limit all processes of a run together, such as requests at once.
    """

    flag = "rm_type"
    data: ClassVar[str] = ""
    limit: ClassVar[str] = ""
    needs_label: ClassVar[bool] = True
    instead_of_label: ClassVar[str | None] = None
    libraries: ClassVar[tuple[str, ...]] = ()
    shared_limits: ClassVar[tuple[str, ...]] = ()

    @property
    def reads_row(self) -> bool:
        """Whether the score depends on the prompt's row, such as its label, and so tells a right answer."""
        return bool(self.data)

    @abstractmethod
    def score(self, samples: Sequence[Sample], flags: F) -> Rewards:
        """Return one finite number per sample, in order; ``NotAReward`` for a sample that cannot be scored.

        Raises:
            ValueError: A prompt lacks the value that the reward compares with; the message names the prompt.
        """

    def check(self, flags: F, errors: Errors) -> None:
        """Report the rules that ``flags`` break."""
        return None

    def check_prompt(self, prompt: Prompt, flags: F) -> None:
        """Check, in little time, that the prompt's row has the values that answers to it are scored with.

        Raises:
            ValueError: It has not; the message names the prompt.
        """
        return None

    def build(self, flags: F) -> Callable[[Sequence[Sample]], Rewards | Awaitable[Rewards]]:
        """Return the function that scores samples in this run, on the machine that scores.

        Raises:
            InputError: A library is missing, or the machine does not permit the reward's work.
        """
        for library in self.libraries:
            module, _, install = library.partition(" ")
            if find_spec(module) is None:
                raise InputError(
                    f"--rm-type {self.name}: the package {module} is not installed; install it {install}".rstrip()
                )
        return lambda samples: self.score(samples, flags)

    def __call__(self, samples: Sequence[Sample]) -> Rewards:
        """Return the rewards with the default flags."""
        return self.score(samples, cast(F, self.own_flags and self.own_flags()))


class SubprocessReward(Reward[F]):
    """A reward that judges each answer in ``subprocess_call``. One that ends there too late or dies is scored 0."""

    @abstractmethod
    def judge(self, sample: Sample, flags: F) -> float:
        """Return the reward of one sample.

        Raises:
            ValueError: The prompt lacks the value that the reward compares with; the message names the prompt.
            SubprocessCallTimeout: Judging it took too long.
            SubprocessDied: Judging it killed the process.
        """

    def score(self, samples: Sequence[Sample], flags: F) -> Rewards:
        """Judge the samples in several processes."""
        return in_parallel(partial(self._judge_or_log, flags=flags), samples)

    def _judge_or_log(self, sample: Sample, flags: F) -> float:
        try:
            return self.judge(sample, flags)
        except (SubprocessCallTimeout, SubprocessDied) as error:
            log_no_verdict(self.name, sample, error)
            return 0.0


_logger = logging.getLogger(__name__)


def log_no_verdict(rm_type: str, sample: Sample, error: Exception) -> None:
    """Log that ``sample`` is scored 0, because judging it raised ``error``."""
    _logger.warning(
        "--rm-type %s: no verdict (%s), scored 0: prompt %s, response ends %r",
        rm_type,
        one_line(f"{type(error).__name__}: {error}", 200),
        sample.prompt.source,
        sample.response[-80:],
    )
