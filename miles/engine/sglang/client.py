"""Talk to one SGLang server over HTTP: its calls, what counts as a valid answer, and how it takes weights."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles.config.components import stop_pattern
from miles.engine.base import Generation, GenerationRequest, SamplingParams
from miles.engine.servers.client import (
    EngineUnavailable,
    RequestRefused,
    ServerClient,
    ServerReceiver,
    as_numbers,
    check_prompt_tokens,
    checked_generation,
    checked_support,
    read_version,
)
from miles.engine.weight_sync.deltas import WeightFolder
from miles.types.replay import TokenSets, dtype_for
from miles.types.weights import WeightChunk

WRONG_KEY = (
    "the server wants another key; give the one that it was started with, as --sglang-api-key and "
    "--sglang-admin-api-key"
)


class SglangClient(ServerClient):
    """Call one SGLang server, or sglang-router; ``miles.engine.servers.client.ServerClient``."""

    generate_path = "/generate"
    wrong_key = WRONG_KEY

    def _body(self, request: GenerationRequest, seed: int, vocab: int, cache_key: str | None) -> dict[str, Any]:
        """Return the body. SGLang honours the seed only under deterministic inference on GPUs."""
        images, sampling = request.images, request.sampling
        return {
            "input_ids": request.prompt_ids if images is None else images.unexpanded(request.prompt_ids),
            **({} if images is None else {"image_data": images.uris()}),
            "sampling_params": sampling_params(sampling, seed),
            "return_logprob": True,
            **({} if cache_key is None else {"extra_key": cache_key}),
            **({"return_sampling_mask": True} if sampling.returns_support else {}),
            **({"return_routed_experts": True} if sampling.returns_experts else {}),
        }

    def _read(
        self, answer: dict[str, Any], request: GenerationRequest, vocab: int, experts_shape: tuple[int, int] | None
    ) -> Generation:
        generation = read_generation(answer, vocab, request.sampling.returns_support)
        if not generation.token_ids:
            return generation
        check_prompt_tokens(answer["meta_info"], request)
        if not request.sampling.returns_experts:
            return generation
        assert experts_shape is not None, "the engine knows the model's experts"
        positions = len(request.prompt_ids) + len(generation.token_ids) - 1
        return replace(generation, experts=read_experts(answer["meta_info"], (positions, *experts_shape)))

    async def input_log_probs(self, token_ids: Sequence[int], first: int) -> list[tuple[int, float]]:
        """Return the tokens from position ``first`` on, as the server has them, with log-probs at temperature 1."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": max(0, first - 1),  # SGLang gives none of the first token of these
        }
        answer = await self._send("POST", self.generate_path, body, self._seconds, self._key)
        with self._reading_log_probs(answer):
            entries = answer["meta_info"]["input_token_logprobs"][first - len(token_ids) :]
            return [(int(entry[1]), float(entry[0])) for entry in entries]

    async def check_health(self, version: int | None) -> None:
        """Ask for the server's own test, then check the version of its weights (None: any version).

        A busy server passes its own test as long as it makes progress.
        """
        await self._send("GET", "/health_generate", None, self._seconds, self._key)
        info = await self._send("GET", "/model_info", None, self._seconds, self._key)
        self._check_version(read_version(info.get("weight_version")), version)

    async def pause(self, mode: str) -> None:
        """Stop at the next token. ``mode`` is the value of ``--pause-generation-mode``."""
        await self.control("/pause_generation", {"mode": mode}, self._seconds)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self.control("/continue_generation", {}, self._seconds)

    async def abort_all(self) -> None:
        """End every request that the server has."""
        await self.control("/abort_request", {"abort_all": True}, self._seconds)

    async def release_memory(self) -> None:
        """Release the GPU memory of weights and cache."""
        await self.control("/release_memory_occupation", {}, self._seconds)

    async def take_memory(self, for_weights: bool) -> None:
        """Take back the memory of the weights, or the memory of cache and CUDA graphs."""
        tags = ["weights"] if for_weights else ["kv_cache", "cuda_graph"]
        await self.control("/resume_memory_occupation", {"tags": tags}, self._seconds)


def sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return ``sampling`` under SGLang's names. A stop token ends a response and stays in it.

    SGLang looks for a text of its ``stop`` in as many last tokens as its tokenizer makes of the text, and one more. A
    model may write it with more tokens. ``stop_pattern`` has it look at enough.
    """
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        **({"stop_regex": [stop_pattern(text) for text in sampling.stop_texts]} if sampling.stop_texts else {}),
        "sampling_seed": seed & 0x7FFFFFFF,  # SGLang's kernels hash 32-bit seeds
    }


def read_generation(answer: dict[str, Any], vocab: int, with_support: bool = False) -> Generation:
    """Read the response in SGLang's answer, with the support of each token if that was asked for.

    Raises:
        EngineUnavailable: If a field is missing or malformed.
        RequestRefused: If the server knows no supports.
    """
    try:
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        token_ids = as_numbers(int, answer["output_ids"])
        values, tokens, *_ = zip(*entries, strict=False) if entries else ((), ())
        log_probs, chosen = as_numbers(float, values), as_numbers(int, tokens)
        reason = meta["finish_reason"]["type"]
        # If the weights changed during the response, SGLang lists the runs as spans of token positions, in order.
        spans = meta.get("weight_versions") or ()
        runs = [(read_version(span["version"]), int(span["end"]) - int(span["start"])) for span in spans]
        last = read_version(meta["weight_version"])
        earlier = tuple(run for run in runs[:-1] if run[1] > 0)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EngineUnavailable(f"an answer that is no generation ({error!r}): {str(answer)[:300]}") from error
    if chosen != token_ids:
        raise EngineUnavailable(
            f"an answer that is no generation: its log-probs are of other tokens: {str(answer)[:300]}"
        )
    generation = checked_generation(Generation(token_ids, log_probs, reason, last, earlier), vocab, answer)
    if not with_support:
        return generation
    log_probs, support = read_support(meta, token_ids, vocab)
    return replace(generation, log_probs=log_probs, support=support)


def read_support(meta: dict[str, Any], token_ids: Sequence[int], vocab: int) -> tuple[list[float], TokenSets]:
    """Return the log-probs of the tokens over the sets that they were drawn from, and these sets.

    Raises what ``read_generation`` does.
    """
    sets = meta.get("output_token_sampling_mask", [] if not token_ids else None)
    if sets is None:
        raise RequestRefused(
            "the server returns no tokens that top-p, top-k and min-p have kept; SGLang 0.5.23 and later do, and a "
            "router must pass the field return_sampling_mask on: use those, or add --no-support-replay"
        )
    return checked_support(sets, meta.get("output_token_sampling_logprobs", []), token_ids, vocab, meta)


def read_experts(meta: dict[str, Any], shape: tuple[int, int, int]) -> np.ndarray:
    """Return the experts of all tokens but the last, of ``shape``: positions, layers, k.

    SGLang gives them as int32 in base64 (0.5.23, ``srt/managers/tokenizer_manager.py``, ``routed_experts``).

    Raises:
        EngineUnavailable: They are of another shape.
        RequestRefused: If the server gives none.
    """
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise RequestRefused(
            "--use-rollout-routing-replay: the server does not return the experts that it chose; start it with "
            "--enable-return-routed-experts"
        )
    try:
        numbers = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
    except (TypeError, ValueError) as error:
        raise EngineUnavailable(f"an answer whose experts cannot be read ({error})") from error
    if len(numbers) != math.prod(shape) or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < 2**15):
        raise EngineUnavailable(f"an answer with {len(numbers)} experts, for a shape of {shape}")
    return numbers.reshape(shape).astype(dtype_for(int(numbers.max(initial=0)) + 1))


# Give one SGLang server new weights.


SESSION_OPEN = "session is already open"  # SGLang's words (srt/managers/scheduler_components/weight_updater.py)
# What SGLang has computed for 3-D rotary positions would be overwritten too, and nothing sends it.
_NOT_WEIGHTS = {"skip_tensor_list": ["axis_map"]}


class SglangReceiver(ServerReceiver):
    """Receive weights as an SGLang server; ``miles.engine.servers.client.ServerReceiver``.

    With ``flush``, the last chunk also flushes the prefix cache, which the old weights have computed. SGLang refuses to
    flush it while requests run, so the server must be idle or paused by retraction. Without ``flush``, later requests
    must use another cache key.
    """

    async def begin_update(self) -> None:
        """Open an update; see ``WeightReceiver``."""
        try:
            await self._begin()
        except RequestRefused as refusal:
            if SESSION_OPEN not in str(refusal):
                raise
            # A sender that failed halfway, or died, left it open: nobody knows how many bytes it had sent. This update
            # overwrites them.
            await self._client.control("/end_weight_update", {})
            await self._begin()

    async def _begin(self) -> None:
        await self._client.transfer("/begin_weight_update", {}, 0)  # it moves no weights

    async def end_update(self) -> None:
        """Close the update; see ``WeightReceiver``. The server may convert each weight once more."""
        await self._client.transfer("/end_weight_update", {}, self._received)

    async def load_folder(self, folder: WeightFolder, version: int) -> None:
        """Read all weights from ``folder``; see ``WeightReceiver``."""
        body = {"model_path": folder.path, "load_format": "safetensors", **self._version(version, last=True)}
        await self._client.transfer("/update_weights_from_disk", body, folder.nbytes)

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
