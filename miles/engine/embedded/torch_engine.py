"""The embedded engine: generate with a transformers model inside the rollout process, with continuous batching."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import torch

from miles.base.profiling import span
from miles.base.text import one_line
from miles.base.tokenizer import load_tokenizer
from miles.config.settings import Settings
from miles.engine.base import EngineHost, Generation, GenerationRequest
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.running_batch import RunningBatch, Sequence
from miles.engine.embedded.sampling import StopText
from miles.models.packing import is_compared_by_test, model_type
from miles.types.replay import TokenSetsBuilder
from miles.types.weights import WeightChunk


@dataclass(eq=False)
class _Request:
    """The sequences of one ``generate`` call, and the future that it awaits."""

    sequences: list[Sequence]
    finished: asyncio.Future[list[Generation]]

    def settle(self) -> None:
        """Answer the caller once every sequence has ended."""
        if not self.finished.done() and all(s.finish_reason is not None for s in self.sequences):
            self.finished.set_result([s.result() for s in self.sequences])


class TorchEngine:
    """Generate with a decoder-only transformers model; ``miles.engine.base.Engine``. docs/models.md has the families.

    One asyncio task serves all requests: between two steps it removes finished sequences from the batch and admits
    waiting ones, up to ``max_batch_size``. The steps run on a thread of their own. A response depends on the weights,
    the prompt, the sampling and its seed, not on the rest of the batch, up to the rounding of matrix products.

    A response in flight during ``update_weights`` continues with the new weights and keeps the cache of the old ones.
    The version of each of its tokens is recorded.
    """

    def __init__(
        self,
        model_path: str,
        dtype: torch.dtype,
        device: str,
        max_batch_size: int,
        decode: Callable[[list[int]], str] | None = None,
        fp32_head: bool = False,
    ) -> None:
        """Load the model onto ``device``. Raises ``ValueError`` for a model that would be computed wrongly.

        ``decode`` returns the text of tokens; requests with ``stop_texts`` need it. ``fp32_head`` is --fp32-lm-head.
        """
        self._decode = decode
        self._max_batch_size = max_batch_size
        # Everything that touches tensors runs on this one thread, loading included. Each thread that calls torch has a
        # separate OpenMP pool; with more pools than cores, their workers sleep between operations, which halves the
        # speed.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")
        self._runner = self._thread.submit(_load, model_path, dtype, device, fp32_head).result()
        self._batch = RunningBatch(self._runner)
        self._version = 0
        self._weights_whole = True
        self._closed = False
        self._requests: list[_Request] = []
        self._waiting: deque[Sequence] = deque()
        self._between_steps = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, in order. Requests of one tick of the loop are admitted together.

        Raises:
            ValueError: For an empty prompt, a token id outside the vocabulary, sampling values outside their range, and
                a prompt that leaves no room for ``max_new_tokens`` in the model's context.
            RuntimeError: If the last weight update failed.
        """
        assert not self._closed, "generate() after close()"
        self._check(request)
        if not self._weights_whole:
            async with self._between_steps:
                pass  # an update is in progress, or it failed
        self._check_weights()
        if not request.seeds:
            return []
        stop_ids = self._runner.eos_ids | frozenset(request.sampling.stop_token_ids)
        stop_text = None
        if request.sampling.stop_texts:
            assert self._decode is not None, "an engine built without it takes no stop texts"
            stop_text = StopText(request.sampling.stop_texts, self._decode)
        if request.sampling.returns_experts:
            await self._on_thread(self._runner.prepare_experts)
        vocab_size = self._runner.vocab_size
        sequences = [
            Sequence(
                request.prompt_ids,
                request.sampling,
                stop_ids,
                seed,
                self._version,
                stop_text=stop_text,
                support=TokenSetsBuilder(vocab_size) if request.sampling.returns_support else None,
                images=request.images,
            )
            for seed in request.seeds
        ]
        entry = _Request(sequences, asyncio.get_running_loop().create_future())
        self._requests.append(entry)
        self._waiting.extend(sequences)
        if self._serving is None or self._serving.done():
            # The new task starts after those that are ready now, so its first batch has what they submit.
            self._serving = asyncio.create_task(self._serve())
        return await entry.finished

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace all weights between two steps. Later tokens carry ``version``.

        Raises:
            ValueError: Naming tensors that are missing, unknown or misshapen. The engine is then unhealthy, ends the
                requests in flight with an error, and refuses to generate until an update succeeds.
        """
        async with self._between_steps:
            self._weights_whole = False
            await self._on_thread(lambda: self._load_weights(chunks))
            self._weights_whole = True
            self._version = version

    def _load_weights(self, chunks: Iterable[WeightChunk]) -> None:
        with span("load weights"):
            self._runner.load_weights(chunks)

    async def abort(self) -> None:
        """End every request between two steps. Each returns the tokens that it has, with finish_reason ``abort``."""
        async with self._between_steps:
            for sequence in (*self._batch.sequences, *self._waiting):
                sequence.finish_reason = "abort"
            self._retire()

    def queue_lengths(self) -> dict[str, int]:
        """Return how many requests are not answered, and how many of their sequences run and wait."""
        running, waiting = len(self._batch.sequences), len(self._waiting)
        return {"requests at the engine": len(self._requests), "sequences running": running, "waiting": waiting}

    async def close(self) -> None:
        """End all requests as ``abort`` does, and release the model, its cache and the thread."""
        self._closed = True
        await self.abort()
        if self._serving is not None:
            await self._serving
        self._thread.shutdown()
        del self._batch, self._runner

    async def _serve(self) -> None:
        """Step until no sequence is left. A failure is raised in every caller, and leaves the engine empty."""
        try:
            while self._batch.sequences or self._waiting:
                async with self._between_steps:
                    self._check_weights()
                    await self._step()
        except Exception as error:
            for request in self._requests:
                if not request.finished.done():
                    request.finished.set_exception(error)
            self._waiting.clear()
            self._batch = RunningBatch(self._runner)
            self._runner.cache.clear()
            self._requests.clear()

    async def _step(self) -> None:
        """Decode one token of every running sequence, then admit waiting ones into the free rows."""
        if self._batch.sequences:
            await self._on_thread(lambda: self._batch.step(self._version))
        self._retire()
        free = self._max_batch_size - len(self._batch.sequences)
        admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if admitted:
            await self._on_thread(lambda: self._batch.admit(admitted, self._version))
            self._retire()

    def _retire(self) -> None:
        """Answer the finished requests, drop those whose callers were cancelled, and free their rows."""
        for request in self._requests:
            if request.finished.cancelled():
                for sequence in request.sequences:
                    sequence.finish_reason = sequence.finish_reason or "abort"
            request.settle()
        self._requests = [r for r in self._requests if not r.finished.done()]
        self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        self._batch.retire()

    async def _on_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check_weights(self) -> None:
        if not self._weights_whole:
            raise RuntimeError("the last weight update failed halfway: send a complete one before generating")

    def _check(self, request: GenerationRequest) -> None:
        request.check(self._runner.vocab_size)
        length, new = len(request.prompt_ids), request.sampling.max_new_tokens
        if length + new > self._runner.max_length:
            raise ValueError(
                f"a prompt of {length} tokens and --rollout-max-response-len {new} make {length + new}, more than the "
                f"model's {self._runner.length_field} {self._runner.max_length}: shorten either, or set "
                "--rollout-max-context-len"
            )


def _load(model_path: str, dtype: torch.dtype, device: str, fp32_head: bool) -> ModelRunner:
    runner = ModelRunner(model_path, dtype, device, fp32_head)
    check_untested_model(runner, model_path)
    return runner


async def start(settings: Settings, host: EngineHost) -> TorchEngine:
    """Build the engine of a run, on the device of the rollout process."""
    assert settings.model.hf_checkpoint is not None
    dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
    decode = partial(_decoded, settings.model.hf_checkpoint)
    longest_batch = settings.rollout.torch_engine_max_batch_size
    fp32_head = settings.training.fp32_lm_head
    return TorchEngine(settings.model.hf_checkpoint, dtype, host.device, longest_batch, decode, fp32_head)


def _decoded(model_path: str, token_ids: list[int]) -> str:
    """Return the text of tokens, with special tokens. Loads the model's tokenizer for the first call."""
    return str(_tokenizer(model_path).decode(token_ids, skip_special_tokens=False))


_tokenizer = cache(load_tokenizer)


# Compare a model in the engine with transformers' own forward pass, before it generates.
#
# Types of models that a test compares are in models/packing.py; all others are compared here, once, with their
# own weights.


_LENGTHS = (6, 11)  # tokens of the two sequences
_WIDTH = 16  # that a decoding step reads, wider than either
_FAULTS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, AssertionError)


def check_untested_model(runner: ModelRunner, model_path: str) -> None:
    """Compare the model, unless a test of miles compares its type, and print how long it took.

    Raises:
        ValueError: As ``compare_with_transformers``.
    """
    config = runner.model.config.to_dict()
    if is_compared_by_test(config):
        return
    started = time.perf_counter()
    difference = compare_with_transformers(runner, model_path)
    seconds = time.perf_counter() - started
    print(
        f"note: --hf-checkpoint {model_path}: compared with transformers in {seconds:.1f} s, "
        f"the log-probs of a {model_type(config)} in --rollout-engine torch differ by {difference:.1e} on average",
        flush=True,
    )


@torch.inference_mode()
def compare_with_transformers(runner: ModelRunner, model_path: str) -> float:
    """Compare what follows two sequences before and after a decoding step, and return the mean difference.

    Rounding may change half of the digits of the weights' dtype, as in training/fsdp/packing_check.py.

    Raises:
        ValueError: Log-probs differ by more, or the layers do not run; with the figures and what to do.
    """
    name = f"--hf-checkpoint {model_path}: a {model_type(runner.model.config.to_dict())} in --rollout-engine torch"
    drawn = torch.Generator().manual_seed(0)
    sequences = [torch.randint(runner.vocab_size, (n,), generator=drawn).tolist() for n in _LENGTHS]
    try:
        expected = torch.stack([runner.own_logits(tokens)[-2:] for tokens in sequences], 1)
        first = runner.prefill([tokens[:-1] for tokens in sequences], first_row=0)
        second = runner.decode([tokens[-1] for tokens in sequences], [n - 1 for n in _LENGTHS], _WIDTH)
    except torch.OutOfMemoryError:
        raise
    except _FAULTS as error:
        why = one_line(f"{type(error).__name__}: {error}", 300)
        raise ValueError(f"{name} does not run ({why}); choose another model, or --rollout-engine sglang") from error
    finally:
        runner.cache.clear()
    computed = torch.stack([first, second])
    difference = (computed.float().log_softmax(-1) - expected.float().log_softmax(-1)).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    allowed = math.sqrt(torch.finfo(expected.dtype).eps)
    if not mean <= allowed:  # NaN is refused
        raise ValueError(
            f"{name} does not have transformers' log-probs: they differ by {mean:.1e} on average and {largest:.1e} at "
            f"most, {allowed:.1e} on average is rounding; choose another model, or --rollout-engine sglang"
        )
    return mean
