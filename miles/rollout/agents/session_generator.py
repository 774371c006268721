"""What makes trajectories by recorded calls: the part that agent programs and environments share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from miles.base.flags import json_object
from miles.config.components import engine_spec
from miles.config.settings import Settings
from miles.engine.base import Engine, SamplingParams
from miles.rollout.agents.chat_format import ChatFormat
from miles.rollout.agents.session import Session
from miles.rollout.groups import SeedOf
from miles.rollout.trajectory import Trajectory, generate_trajectories
from miles.types.sample import PromptGroup, Sample


class SessionGenerator(ABC):
    """A ``GroupGenerator`` that makes each trajectory by calls of the model, which a session records."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Read the flags.

        Args:
            settings: The run.
            name: The flag and its value, for messages about a trajectory.
        """
        rollout = settings.rollout
        self._name = name
        self._seconds = rollout.agent_timeout
        self._template_kwargs = json_object("apply_chat_template_kwargs", settings.data.apply_chat_template_kwargs)
        # Servers have a tokenizer only under --rollout-stop. An answer that --partial-rollout has interrupted is
        # continued without the text before.
        engine = engine_spec(rollout.rollout_engine)
        sees_text = bool(rollout.stop_texts) or not engine.has_servers
        self._takes_stop_texts = sees_text and not rollout.partial_rollout
        self._stop_text_limits = engine.stop_text_limits
        self._chat: ChatFormat | None = None

    async def __call__(
        self,
        group: PromptGroup,
        engine: Engine,
        sampling: SamplingParams,
        tokenizer: Any,
        *,
        n_samples: int,
        seed_of: SeedOf,
        max_context_len: int | None = None,
    ) -> PromptGroup:
        """Return the group with ``n_samples`` trajectories. See ``GroupGenerator``.

        A program or environment that fails leaves samples with a ``failure``, which are scored as ``--reward-error``
        says.

        Raises:
            Exception: Whatever the engine raises.
        """
        return await generate_trajectories(
            self._run,
            self._name,
            group,
            engine,
            sampling,
            tokenizer,
            n_samples=n_samples,
            seed_of=seed_of,
            max_context_len=max_context_len,
        )

    @abstractmethod
    async def _run(self, trajectory: Trajectory) -> list[Sample]:
        """Make one trajectory."""

    @abstractmethod
    async def close(self) -> None:
        """End the trajectories in progress, and release what they share."""

    def _session(self, trajectory: Trajectory) -> Session:
        """Return a session that records the calls of ``trajectory``."""
        if self._chat is None:
            self._chat = ChatFormat(trajectory.tokenizer, self._template_kwargs)
        return Session(
            trajectory,
            self._chat,
            takes_stop_texts=self._takes_stop_texts,
            stop_text_limits=self._stop_text_limits,
        )
