"""An engine whose responses survive an abort: they wait, and continue later under the weights of that time."""

import asyncio
from dataclasses import replace
from itertools import groupby

from miles.base.threads import gather_or_cancel
from miles.engine.base import Engine, EngineWrapper, Generation, GenerationRequest
from miles.rollout.groups import response_seed
from miles.types.replay import continued, extended


class InterruptibleEngine(EngineWrapper):
    """No response of this engine ends with finish_reason ``abort``.

    ``interrupt`` aborts the responses in flight, while every caller keeps waiting. After ``continue_generation`` each
    aborted response is requested again with its own tokens appended to the prompt, and the caller gets the complete
    response with the version of each token. So an iteration can end while responses are unfinished (partial rollouts),
    whatever code awaits them.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._open = asyncio.Event()
        self._open.set()

    async def interrupt(self) -> None:
        """Return when nothing is in flight. Requests that arrive from now on wait, too."""
        self.hold()
        await self._engine.abort()

    def hold(self) -> None:
        """Have requests wait from now on, and those in flight once they are aborted."""
        self._open.clear()

    def continue_generation(self) -> None:
        """Request the interrupted responses again."""
        self._open.set()

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one complete ``Generation`` per seed, in order; raises the engine's errors.

        An interrupted response is still a function of weights, prompt, sampling, seed and the positions at which it was
        interrupted: later tokens have a seed that is derived from its own and their position.
        """
        await self._while_closed()
        answers = await self._engine.generate(request)
        ends = (self._to_its_end(request, seed, answer) for seed, answer in zip(request.seeds, answers, strict=True))
        return await gather_or_cancel(ends)

    async def _while_closed(self) -> None:
        while not self._open.is_set():  # a loop: it may be closed again before this task runs
            await self._open.wait()

    async def _to_its_end(self, request: GenerationRequest, seed: int, answer: Generation) -> Generation:
        while answer.finish_reason == "abort":
            await self._while_closed()
            done = len(answer.token_ids)
            rest = GenerationRequest(
                prompt_ids=(*request.prompt_ids, *answer.token_ids),
                seeds=(response_seed(seed, "from", done) if done else seed,),
                sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - done),
                images=request.images,
            )
            [more] = await self._engine.generate(rest)
            answer = _joined(answer, more)
        return answer

    async def abort(self) -> None:
        """Interrupt and continue at once: an abort from elsewhere costs only time."""
        await self.interrupt()
        self.continue_generation()


def _joined(first: Generation, rest: Generation) -> Generation:
    """Return one response made of two parts."""
    versions = [*first.token_versions, *rest.token_versions]
    runs = [(version, len(list(run))) for version, run in groupby(versions)]
    if runs and runs[-1][0] == rest.weight_version:  # the rest of the tokens have ``weight_version``
        runs.pop()
    return Generation(
        [*first.token_ids, *rest.token_ids],
        [*first.log_probs, *rest.log_probs],
        rest.finish_reason,
        rest.weight_version,
        tuple(runs),
        extended(first.support, len(first.token_ids), rest.support, len(rest.token_ids)),
        continued(first.experts, rest.experts),
    )
