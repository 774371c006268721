"""Give one vLLM server new weights, from a folder."""

from __future__ import annotations

from collections.abc import Sequence

from miles.engine.base import Server
from miles.engine.vllm.client import VllmClient
from miles.engine.weight_sync.deltas import CopySource, WeightFolder
from miles.types.weights import WeightChunk

ONLY_FILES = "config/vllm/rules.py refuses other ways for weights than files"


class VllmReceiver:
    """Receive weights as a vLLM server; ``miles.engine.weight_sync.transport.WeightReceiver``.

    With ``flush``, an update empties the prefix cache, and requests in flight are prefilled again by the new weights.
    Without, they keep the cache of the old weights, and later requests must use another cache key.
    """

    def __init__(self, client: VllmClient, num_ranks: int, flush: bool, process: Server) -> None:
        self.url = client.url
        self.num_ranks = num_ranks
        self._client = client
        self._flush = flush
        self._process = process

    async def load_folder(self, folder: WeightFolder, version: int) -> None:
        """Read all weights from ``folder``; see ``WeightReceiver``. The server is paused meanwhile."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder.path}}
        await self._client.transfer("/collective_rpc", call, folder.nbytes)
        if self._flush:
            await self._client.control("/reset_prefix_cache?reset_running_requests=true", {})
        await self._client.control("/update_weight_version", {"new_version": str(version)})

    async def load_copy(self, source: CopySource, version: int) -> None:
        """Read all weights from the copy of the server's host; see ``WeightReceiver``."""
        await self.load_folder(await self._process.update_copy(source), version)

    async def scramble(self) -> None:
        """Overwrite every weight with random numbers."""
        await self._client.control("/weight_checker", {"action": "reset"})

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight, by vLLM's own name."""
        answer = await self._client.control("/weight_checker", {"action": "checksum"})
        return {str(name): str(checksum) for name, checksum in answer["checksums"].items()}

    async def begin_update(self) -> None:
        """Not called for files."""
        raise AssertionError(ONLY_FILES)

    async def end_update(self) -> None:
        """Not called for files."""
        raise AssertionError(ONLY_FILES)

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
        """Not called for files."""
        raise AssertionError(ONLY_FILES)

    async def receive_broadcast(self, chunk: WeightChunk, group: str, version: int, last: bool) -> None:
        """Not called for files."""
        raise AssertionError(ONLY_FILES)

    async def receive_shared(self, payloads: Sequence[bytes], nbytes: int, version: int, last: bool) -> None:
        """Not called for files."""
        raise AssertionError(ONLY_FILES)
