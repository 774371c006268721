"""Talk to one vLLM server over HTTP: its calls, what counts as a valid answer, and how it takes weights.

Written against vLLM 0.32.0: ``entrypoints/scale_out/token_in_token_out`` (tokens in and out) and
``entrypoints/rl/online`` (pauses, versions, weights).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from miles.types.replay import TokenSets
from miles.types.weights import WeightChunk

FIRST_WEIGHTS = "default"  # vLLM's version of the weights that a server has loaded when it started
DROPPED = -9000.0  # vLLM writes -9999 for the log-prob of a token that top-k, top-p or min-p dropped
TIES = 64  # vLLM keeps all tokens that are as likely as the last one of the top k: so many more are asked for
WHOLE = 1e-3  # how far the probabilities of the kept tokens may be from 1: fp32 sums of a few thousand


class VllmClient(ServerClient):
    """Call one vLLM server; ``miles.engine.servers.client.ServerClient``."""

    generate_path = "/inference/v1/generate"
    wrong_key = "the server wants another key"

    def _body(self, request: GenerationRequest, seed: int, vocab: int, cache_key: str | None) -> dict[str, Any]:
        prompt, images = list(request.prompt_ids), request.images
        return {
            "token_ids": prompt if images is None else images.unexpanded(prompt),
            **({} if images is None else {"content_parts": [{"type": "image_url", "url": u} for u in images.uris()]}),
            "sampling_params": sampling_params(request.sampling, seed, vocab),
            **({} if cache_key is None else {"cache_salt": cache_key}),
        }

    def _read(
        self, answer: dict[str, Any], request: GenerationRequest, vocab: int, experts_shape: tuple[int, int] | None
    ) -> Generation:
        generation = read_generation(answer, vocab, request.sampling.returns_support)
        if generation.token_ids:
            check_prompt_tokens(answer.get("usage") or {}, request)
        return generation

    async def input_log_probs(self, token_ids: Sequence[int], first: int) -> list[tuple[int, float]]:
        """Return the tokens from position ``first`` on, as the server has them, with log-probs at temperature 1."""
        body = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = await self._send("POST", "/v1/completions", body, self._seconds, self._key)
        with self._reading_log_probs(answer):
            entries = answer["choices"][0]["prompt_logprobs"][first - len(token_ids) :]
            pairs = []
            for entry in entries:
                (token, about), *_ = entry.items()  # the prompt's own token comes first
                pairs.append((int(token), float(about["logprob"])))
            return pairs

    async def check_health(self, version: int | None) -> None:
        """Ask for its health, then for its weights: the process that generates answers the second between two steps."""
        await self._send("GET", "/health", None, self._seconds, self._key)
        info = await self._send("GET", "/weight_info", None, self._seconds, self._admin_key)
        self._check_version(version_of(info.get("weight_version")), version)

    async def pause(self, mode: str) -> None:
        """Stop at the next token. Requests in flight stay, with what they have computed.

        vLLM 0.32.0 empties its caches, although it states that it keeps them in this mode, unless it is told not to.
        """
        await self.control("/pause?mode=keep&clear_cache=false", {}, self._seconds)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self.control("/resume", {}, self._seconds)

    async def abort_all(self) -> None:
        """End every request that the server has; each is answered with its tokens so far."""
        await self.control("/abort_requests", {}, self._seconds)

    async def release_memory(self) -> None:
        """Drop weights and cache from the GPU's memory. Needs a server with ``--enable-sleep-mode``."""
        await self.control("/sleep?level=2", {}, self._seconds)

    async def take_memory(self, for_weights: bool) -> None:
        """Take back the memory of the weights, or the memory of the cache."""
        await self.control(f"/wake_up?tags={'weights' if for_weights else 'kv_cache'}", {}, self._seconds)


def sampling_params(sampling: SamplingParams, seed: int, vocab: int) -> dict[str, Any]:
    """Return ``sampling`` under vLLM's names. A stop token ends a response and stays in it, and so does a stop text."""
    wanted = min(sampling.top_k + TIES, vocab) if sampling.returns_support else 0
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "logprobs": wanted,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,  # in the text that is searched for the texts of --rollout-stop
        **({"stop": list(sampling.stop_texts), "include_stop_str_in_output": True} if sampling.stop_texts else {}),
    }


def read_generation(answer: Mapping[str, Any], vocab: int, with_support: bool = False) -> Generation:
    """Read the response in vLLM's answer, with the support of each token if that was asked for.

    Raises:
        EngineUnavailable: If a field is missing or malformed.
        RequestRefused: If the server does not name all tokens that were kept.
    """
    try:
        (choice,) = answer["choices"]
        token_ids = as_numbers(int, choice["token_ids"] or [])
        entries = (choice["logprobs"] or {}).get("content") or []
        log_probs = as_numbers(float, [entry["logprob"] for entry in entries])
        chosen = [entry["token_id"] for entry in entries]
        runs = [(version_of(s["version"]), s["end"] - s["start"]) for s in choice["weight_versions"] or ()]
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineUnavailable(f"an answer that is no generation ({error!r}): {str(answer)[:300]}") from error
    if chosen != token_ids or (token_ids and not runs):
        raise EngineUnavailable(f"an answer that is no generation, of other tokens: {str(answer)[:300]}")
    last = runs[-1][0] if runs else 0
    earlier = tuple(run for run in runs[:-1] if run[1] > 0)
    generation = checked_generation(Generation(token_ids, log_probs, reason, last, earlier), vocab, answer)
    if not with_support:
        return generation
    log_probs, support = read_support(entries, token_ids, vocab)
    return replace(generation, log_probs=log_probs, support=support)


def read_support(
    entries: Sequence[Mapping[str, Any]], token_ids: Sequence[int], vocab: int
) -> tuple[list[float], TokenSets]:
    """Return the log-probs of the tokens over the sets that they were drawn from, and these sets.

    The server's log-probs are those after top-k, top-p and min-p (``--logprobs-mode processed_logprobs``), so the kept
    tokens are those with a probability, and their probabilities sum to 1 if all are named.

    Raises:
        EngineUnavailable: The entries cannot be read.
        RequestRefused: Tokens that were kept are not among the likely ones that were asked for.
    """
    sets = []
    try:
        for entry in entries:
            by_token = {top["token_id"]: top["logprob"] for top in entry["top_logprobs"] if top["logprob"] > DROPPED}
            if abs(sum(map(math.exp, by_token.values())) - 1) > WHOLE:
                raise RequestRefused(
                    f"--rollout-top-k: vLLM keeps all tokens that are as likely as the last one, which are more than "
                    f"{TIES} here; give --rollout-min-p, use --rollout-engine torch, or add --no-support-replay"
                )
            sets.append(sorted(by_token))
        log_probs = [entry["logprob"] for entry in entries]
    except (KeyError, TypeError) as error:
        raise EngineUnavailable(f"an answer whose kept tokens cannot be read ({error!r})") from error
    return checked_support(sets, log_probs, token_ids, vocab, entries)


def version_of(value: Any) -> int:
    """Return the version of the weights: 0 for the first weights, -1 for weights that no update of miles has sent."""
    return 0 if value == FIRST_WEIGHTS else read_version(value)


# Give one vLLM server new weights: from a folder, or by its weight-transfer engine (transfer.py).


class VllmReceiver(ServerReceiver):
    """Receive weights as a vLLM server; ``miles.engine.servers.client.ServerReceiver``.

    With ``flush``, an update empties the prefix cache, and requests in flight are prefilled again by the new weights.
    Without, they keep the cache of the old weights, and later requests must use another cache key.
    """

    _version = 0  # that the bytes of this update make

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
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        shapes = [list(tensor.shape) for tensor in tensors]
        await self._update({"names": list(chunk.tensors), "dtypes": dtypes, "shapes": shapes}, chunk.nbytes, version)

    async def receive_shared(self, payloads: Sequence[bytes], nbytes: int, version: int, last: bool) -> None:
        """Load tensors from shared memory; see ``WeightReceiver``."""
        await self._update([{"shared": base64.b64encode(p).decode()} for p in payloads], nbytes, version)

    async def _update(self, info: Any, nbytes: int, version: int) -> None:
        await self._client.transfer("/update_weights", {"update_info": info}, nbytes)
        self._received += nbytes
        self._version = version
