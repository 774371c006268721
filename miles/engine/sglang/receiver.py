"""Give one SGLang server new weights."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from miles.engine.base import Server
from miles.engine.servers.client import RequestRefused
from miles.engine.sglang.client import SglangClient
from miles.engine.weight_sync.deltas import CopySource, WeightFolder
from miles.types.weights import WeightChunk

SESSION_OPEN = "session is already open"  # SGLang's words (srt/managers/scheduler_components/weight_updater.py)
# What SGLang has computed for 3-D rotary positions would be overwritten too, and nothing sends it.
_NOT_WEIGHTS = {"skip_tensor_list": ["axis_map"]}


class SglangReceiver:
    """Receive weights as an SGLang server; ``miles.engine.weight_sync.transport.WeightReceiver``.

    Every call checks the server's reply. An update that fails halfway leaves weights that nobody should use.

    With ``flush``, the last chunk also flushes the prefix cache, which the old weights have computed. SGLang refuses to
    flush it while requests run, so the server must be idle or paused by retraction. Without ``flush``, later requests
    must use another cache key.
    """

    def __init__(self, client: SglangClient, num_ranks: int, flush: bool, process: Server) -> None:
        self.url = client.url
        self._process = process
        self.num_ranks = num_ranks
        self._client = client
        self._flush = flush
        self._received = 0  # bytes of this update

    async def begin_update(self) -> None:
        """Open an update; see ``WeightReceiver``."""
        try:
            await self._client.begin_update()
        except RequestRefused as refusal:
            if SESSION_OPEN not in str(refusal):
                raise
            # A sender that failed halfway, or died, left it open: nobody knows how many bytes it had sent. This update
            # overwrites them.
            await self._client.control("/end_weight_update", {})
            await self._client.begin_update()

    async def end_update(self) -> None:
        """Close the update; see ``WeightReceiver``. The server may convert each weight once more."""
        await self._client.transfer("/end_weight_update", {}, self._received)

    async def load_folder(self, folder: WeightFolder, version: int) -> None:
        """Read all weights from ``folder``; see ``WeightReceiver``."""
        body = {"model_path": folder.path, "load_format": "safetensors", **self._version(version, last=True)}
        await self._client.transfer("/update_weights_from_disk", body, folder.nbytes)

    async def load_copy(self, source: CopySource, version: int) -> None:
        """Read all weights from the copy of the server's host; see ``WeightReceiver``."""
        await self.load_folder(await self._process.update_copy(source), version)

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
        """Join a process group; see ``WeightReceiver``."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.num_ranks,
            "group_name": group,
            "backend": backend,
        }
        await self._client.control("/init_weights_update_group", body)

    async def receive_broadcast(self, chunk: WeightChunk, group: str, version: int, last: bool) -> None:
        """Take part in the broadcasts of ``chunk``; see ``WeightReceiver``."""
        body = {
            "names": list(chunk.tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in chunk.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in chunk.tensors.values()],
            "group_name": group,
            **self._version(version, last),
        }
        await self._client.transfer("/update_weights_from_distributed", body, chunk.nbytes)
        self._received += chunk.nbytes

    async def receive_shared(self, payloads: Sequence[bytes], nbytes: int, version: int, last: bool) -> None:
        """Load tensors from shared memory; see ``WeightReceiver``."""
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        body = {"serialized_named_tensors": encoded, **self._version(version, last)}
        await self._client.transfer("/update_weights_from_tensor", body, nbytes)
        self._received += nbytes

    async def scramble(self) -> None:
        """Overwrite every weight with random numbers."""
        await self._client.control("/weights_checker", {"action": "reset_tensors", **_NOT_WEIGHTS})

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight, by rank and SGLang's own name."""
        answer = await self._client.control("/weights_checker", {"action": "checksum", **_NOT_WEIGHTS})
        return {
            f"rank {number}: {name}": checksum
            for number, rank in enumerate(answer["ranks"])
            for name, checksum in rank["checksums"].items()
        }

    def _version(self, version: int, last: bool) -> dict[str, object]:
        """Set the version, and flush the cache, only with the last chunk, when the weights are complete."""
        return {"flush_cache": last and self._flush, **({"weight_version": str(version)} if last else {})}
