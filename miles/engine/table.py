"""The generation engines, by the names that ``--rollout-engine`` gives them.

An engine is a row here: a coroutine that returns a started engine. It imports its engine when it is called, because
each engine has libraries of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from miles.arguments.settings import Settings
from miles.engine.base import Engine
from miles.engine.host import EngineHost


async def _torch(settings: Settings, host: EngineHost) -> Engine:
    from miles.engine.embedded.torch_engine import build_torch_engine

    return build_torch_engine(settings, host)


async def _sglang(settings: Settings, host: EngineHost) -> Engine:
    from miles.engine.sglang.engine import start_sglang_engine

    return await start_sglang_engine(settings, host)


ENGINES: dict[str, Callable[[Settings, EngineHost], Awaitable[Engine]]] = {"torch": _torch, "sglang": _sglang}


async def start_engine(settings: Settings, host: EngineHost) -> Engine:
    """Build and start the engine that ``--rollout-engine`` names.

    Raises:
        ValueError: If no engine has this name, and for what the engine refuses.
    """
    name = settings.rollout.rollout_engine
    if name not in ENGINES:
        raise ValueError(f"--rollout-engine {name}: unknown; choose from {', '.join(ENGINES)}")
    return await ENGINES[name](settings, host)
