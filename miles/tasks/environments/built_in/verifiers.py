"""``--environment verifiers``: the environments of the package verifiers (its version 1 API, verifiers 0.4)."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, ClassVar

from miles.base.text import one_line
from miles.base.user_code import user_code_in_thread
from miles.tasks.environments.base import Environment, EnvironmentKind, EnvironmentMaker, Message, Model
from miles.tasks.environments.verifiers_tasks import METADATA, Origin, open_environment
from miles.types.sample import Prompt

MODEL = "policy"


class Verifiers(EnvironmentKind):
    """Prompts come from ``--prompt-data verifiers:TASKSET[:key=value,…]``, whose metadata name task and environment.

    The library holds the loop: its harness calls the model at a URL, as any program of OpenAI's client would. The
    reward of the trajectory is the sum of the weighted rewards of the episode's trainable traces, as the library sums
    them.
    """

    name = "verifiers"
    summary = "an environment of the package verifiers, of prompts verifiers:TASKSET"
    bounds_turns = False
    libraries = ("verifiers with pip install verifiers==0.4.0",)

    def maker(self, options: Mapping[str, Any]) -> EnvironmentMaker:
        """Return the maker of a row's environment."""
        return _Episodes()


class _Episodes:
    """Starts each environment that the rows name once, and serves it until the run ends."""

    def __init__(self) -> None:
        self._served: dict[str, _Served] = {}

    def __call__(self, prompt: Prompt) -> Environment:
        return Episode(self, prompt)

    async def opened(self, origin: Origin) -> tuple[Any, list[Any]]:
        """Return the environment of ``origin`` and its tasks; the first call starts it."""
        key = json.dumps([origin["config"], origin["size"]], sort_keys=True)
        if key not in self._served:
            self._served[key] = _Served(origin)
        return await asyncio.shield(self._served[key].ready)

    async def close(self) -> None:
        """Stop the environments."""
        for served in self._served.values():
            served.ends.set()
        await asyncio.gather(*(served.task for served in self._served.values()), return_exceptions=True)


class _Served:
    """An environment that is being served. One task enters and leaves, as its locks and servers ask for."""

    def __init__(self, origin: Origin) -> None:
        loop = asyncio.get_running_loop()
        self.ends = asyncio.Event()
        self.ready: asyncio.Future[tuple[Any, list[Any]]] = loop.create_future()
        self.task = loop.create_task(self._serve(origin))

    async def _serve(self, origin: Origin) -> None:
        try:
            environment, tasks = await user_code_in_thread(open_environment, origin["config"], origin["size"])
            async with environment.serving():
                self.ready.set_result((environment, tasks))
                await self.ends.wait()
        except Exception as error:  # the library's; who waits for the environment sees it
            if self.ready.done():
                raise
            self.ready.set_exception(error)


class Episode(Environment):
    """One episode. The library plays it, so ``reset`` and ``step`` are never called."""

    needs_url: ClassVar[bool] = True

    def __init__(self, episodes: _Episodes, prompt: Prompt) -> None:
        origin = prompt.metadata.get(METADATA)
        if origin is None:
            raise ValueError(
                f"the prompt {prompt.source} is no task of verifiers; give --prompt-data verifiers:TASKSET, or another "
                "--environment"
            )
        self._episodes = episodes
        self._origin: Origin = origin
        self._reward = 0.0

    async def play(self, model: Model) -> float:
        """Run the episode against the model's URL.

        Raises:
            RuntimeError: The library reports that the episode has failed.
        """
        import verifiers.v1 as vf

        environment, tasks = await self._episodes.opened(self._origin)
        client = vf.EvalClientConfig(base_url=model.url, api_key_var="MILES_HAS_NO_KEY_HERE")
        context = vf.ModelContext(model=MODEL, client=client, sampling=vf.SamplingConfig())
        # The library sends the id of a trace with every call of it.
        episode = await environment.run_episode(
            tasks[self._origin["index"]], context, on_trace=lambda trace: model.accept(trace.id)
        )
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            fault = f"{errors[-1].type}: {errors[-1].message}" if errors else "it names no error"
            raise RuntimeError(f"the episode failed: {one_line(fault, 300)}")
        self._reward = float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))
        return await self.reward()

    async def reset(self) -> Sequence[Message]:
        """Raise: the library begins its conversations."""
        raise NotImplementedError("verifiers plays its episodes on its own")

    async def step(self, answer: Message) -> Sequence[Message]:
        """Raise: the library continues its conversations."""
        raise NotImplementedError("verifiers plays its episodes on its own")

    async def reward(self) -> float:
        """Return the reward of the episode, once it was played."""
        if not isfinite(self._reward):
            raise ValueError(f"the episode has the reward {self._reward}")
        return self._reward
