"""``--rm-type remote_rm``: a reward server, asked over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Optional

from miles.base.flags import Errors, flag
from miles.base.text import one_line
from miles.tasks.rewards.base import NotAReward, Reward, Rewards
from miles.tasks.rewards.http_calls import HttpCallError, JsonClient, check_url
from miles.types.sample import Sample


@dataclass(frozen=True)
class RemoteRmFlags:
    """remote_rm: the flags of ``--rm-type remote_rm``."""

    rm_url: Optional[str] = flag(
        None,
        "URL of --rm-type remote_rm: it is sent {prompt, response, label, metadata} and answers with a number, or with "
        "an object that has one at --rm-url-field",
    )
    rm_url_field: str = flag("reward", "name of the reward in the objects that --rm-url answers with")
    rm_url_batch_size: int = flag(
        1,
        "answers in a request to --rm-url; with 2 or more it is sent a list and answers with one of that length",
        at_least=1,
    )
    rm_url_concurrency: int = flag(32, "requests to --rm-url at once; further answers wait", at_least=1)
    rm_url_retries: int = flag(4, "further attempts if --rm-url is busy (429, 5xx) or does not answer", at_least=0)
    rm_url_timeout: float = flag(60.0, "seconds that an attempt at --rm-url may take", above=0)


class RemoteRm(Reward[RemoteRmFlags]):
    """The number that the server at ``--rm-url`` answers.

    A request that fails after all its attempts, or is answered by anything but a number, is a failure of its answers,
    and ``--reward-error`` states what becomes of them. Only the host of the URL is contacted.
    """

    name = "remote_rm"
    summary = "what a server answers (--rm-url)"
    data = "what the server needs"
    needs_label = False
    limit = "`--rm-url-timeout` per attempt"
    shared_limits = ("rm_url_concurrency",)
    own_flags = RemoteRmFlags

    def check(self, flags: RemoteRmFlags, errors: Errors) -> None:
        """Check the URL."""
        check_url("rm_url", flags.rm_url, "--rm-type remote_rm asks a server", errors)

    def score(self, samples: Sequence[Sample], flags: RemoteRmFlags) -> Rewards:
        """Refuse: rewards come from the function of ``build``, which keeps its connections."""
        raise TypeError("remote_rm keeps connections; call the function that build() returns")

    def build(self, flags: RemoteRmFlags) -> Callable[[Sequence[Sample]], Rewards | Awaitable[Rewards]]:
        """Return a function that asks the server."""
        return RemoteScorer(flags)


class RemoteScorer:
    """Asks a reward server for the rewards of samples.

    Args:
        flags: A ``RemoteRmFlags``.
        first_wait: Seconds before the second attempt.
    """

    def __init__(self, flags: RemoteRmFlags, first_wait: float = 0.5) -> None:
        assert flags.rm_url is not None, "checked"
        self._client = JsonClient(
            flags.rm_url,
            "rm_url",
            concurrency=flags.rm_url_concurrency,
            retries=flags.rm_url_retries,
            seconds=flags.rm_url_timeout,
            first_wait=first_wait,
        )
        self._key = flags.rm_url_field
        self._size = flags.rm_url_batch_size

    async def __call__(self, samples: Sequence[Sample]) -> Rewards:
        """Return one reward per sample."""
        batches = [samples[start : start + self._size] for start in range(0, len(samples), self._size)]
        return [reward for batch in await asyncio.gather(*map(self._ask, batches)) for reward in batch]

    async def _ask(self, batch: Sequence[Sample]) -> Rewards:
        rows = [_row(sample) for sample in batch]
        try:
            answer = await self._client.post(rows if self._size > 1 else rows[0])
        except HttpCallError as error:
            return [NotAReward(f"got no reward: {error}")] * len(batch)
        answers = answer if self._size > 1 else [answer]
        if not isinstance(answers, list) or len(answers) != len(batch):
            what = f"{len(answers)} rewards" if isinstance(answers, list) else _as_text(answers)
            return [NotAReward(f"got {what} from --rm-url for a list of {len(batch)}; answer with a list")] * len(batch)
        return [self._reward(value) for value in answers]

    def _reward(self, value: Any) -> float | NotAReward:
        if isinstance(value, Mapping):
            if self._key not in value:
                return NotAReward(f"got {_as_text(value)} from --rm-url, without {self._key} of --rm-url-field")
            value = value[self._key]
        if isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):  # a whole number that no float holds
                if isfinite(value):
                    return float(value)
        return NotAReward(f"got {_as_text(value)} from --rm-url, which is not a finite number")


def _row(sample: Sample) -> dict[str, Any]:
    prompt = sample.prompt
    return {"prompt": prompt.text, "response": sample.response, "label": prompt.label, "metadata": prompt.metadata}


def _as_text(value: Any) -> str:
    return one_line(f"{type(value).__name__} {value!r:.80}", 100)
