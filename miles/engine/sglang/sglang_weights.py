"""An SGLang server as a receiver of weights: ``miles.weight_sync.transport.WeightReceiver`` in SGLang's own calls."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from miles.engine.sglang.sglang_client import RequestRefused, SglangClient
from miles.weights import WeightChunk

SESSION_OPEN = "session is already open"  # SGLang's words (srt/managers/scheduler_components/weight_updater.py)


class SglangReceiver:
    """Every call checks the server's reply; an update that fails half-way leaves weights nobody should use.

    With ``flush`` the prefix cache, made by the old weights, goes with the last chunk. SGLang refuses to flush it while
    requests run, so the server must be idle or paused by retraction (``SglangEngine`` pauses it). Without, requests
    that come later must have another cache key.
    """

    def __init__(self, client: SglangClient, num_ranks: int, flush: bool) -> None:
        self.url = client.url
        self.num_ranks = num_ranks
        self._client = client
        self._flush = flush

    async def begin_update(self) -> None:
        try:
            await self._client.control("/begin_weight_update", {})
        except RequestRefused as refusal:
            if SESSION_OPEN not in str(refusal):
                raise
            # Of a sender that failed half-way, or died; what it has left is overwritten now.
            await self.end_update()
            await self._client.control("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self._client.control("/end_weight_update", {})

    async def load_folder(self, folder: str, version: int) -> None:
        body = {"model_path": folder, "load_format": "safetensors", **self._version(version, last=True)}
        await self._client.control("/update_weights_from_disk", body)

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
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
        body = {
            "names": list(chunk.tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in chunk.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in chunk.tensors.values()],
            "group_name": group,
            **self._version(version, last),
        }
        await self._client.control("/update_weights_from_distributed", body)

    async def receive_shared(self, payloads: Sequence[bytes], version: int, last: bool) -> None:
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        body = {"serialized_named_tensors": encoded, **self._version(version, last)}
        await self._client.control("/update_weights_from_tensor", body)

    async def scramble(self) -> None:
        await self._client.control("/weights_checker", {"action": "reset_tensors"})

    async def checksums(self) -> dict[str, str]:
        answer = await self._client.control("/weights_checker", {"action": "checksum"})
        return {
            f"rank {number}: {name}": checksum
            for number, rank in enumerate(answer["ranks"])
            for name, checksum in rank["checksums"].items()
        }

    def _version(self, version: int, last: bool) -> dict[str, object]:
        """The version counts, and the cache goes, when the weights are complete."""
        return {"flush_cache": last and self._flush, **({"weight_version": str(version)} if last else {})}
