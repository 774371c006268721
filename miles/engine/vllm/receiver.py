"""Give one vLLM server new weights: from a folder, or by its weight-transfer engine (transfer.py)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from miles.engine.base import Server
from miles.engine.vllm.client import VllmClient
from miles.engine.weight_sync.deltas import CopySource, WeightFolder
from miles.types.weights import WeightChunk


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
        self._received, self._version = 0, 0  # bytes of this update, and the version that they make

    async def load_folder(self, folder: WeightFolder, version: int) -> None:
        """Read all weights from ``folder``; see ``WeightReceiver``. The server is paused meanwhile."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder.path}}
        await self._client.transfer("/collective_rpc", call, folder.nbytes)
        await self._use(version)

    async def _use(self, version: int) -> None:
        """Name the new weights, after what the old ones have computed is gone."""
        if self._flush:
            await self._client.control("/reset_prefix_cache?reset_running_requests=true", {})
        await self._client.control("/reset_encoder_cache", {})  # of images, which it finds by their pixels alone
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
        """Open an update; see ``WeightReceiver``."""
        await self._client.control("/start_weight_update", {})

    async def end_update(self) -> None:
        """Close the update; see ``WeightReceiver``."""
        await self._client.transfer("/finish_weight_update", {}, self._received)
        await self._use(self._version)

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
        """Join a process group; see ``WeightReceiver``."""
        info = {"host": host, "port": port, "group": group, "size": 1 + self.num_ranks}
        await self._client.control("/init_weight_transfer_engine", {"init_info": info})

    async def receive_broadcast(self, chunk: WeightChunk, group: str, version: int, last: bool) -> None:
        """Take part in the broadcasts of ``chunk``; see ``WeightReceiver``."""
        tensors = chunk.tensors.values()
        dtypes, shapes = [str(t.dtype).removeprefix("torch.") for t in tensors], [list(t.shape) for t in tensors]
        await self._update({"names": list(chunk.tensors), "dtypes": dtypes, "shapes": shapes}, chunk.nbytes, version)

    async def receive_shared(self, payloads: Sequence[bytes], nbytes: int, version: int, last: bool) -> None:
        """Load tensors from shared memory; see ``WeightReceiver``."""
        await self._update([{"shared": base64.b64encode(p).decode()} for p in payloads], nbytes, version)

    async def _update(self, info: Any, nbytes: int, version: int) -> None:
        await self._client.transfer("/update_weights", {"update_info": info}, nbytes)
        self._received, self._version = self._received + nbytes, version
