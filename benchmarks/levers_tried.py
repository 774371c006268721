"""What was tried to make a step faster, and is not in miles; levers.py measures it as it does the levers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
import torch.nn.functional as F
from lever_bench import Bench, Call, Lever, patched  # benchmarks/lever_bench.py

from miles.batch.collate import collate
from miles.batch.schedule import schedule_step
from miles.engine.embedded import model_runner as fused_layers
from miles.training.trainer import Trainer

DRAFTS = 3  # tokens that prompt lookup proposes at once
BUDGETS = 4  # micro-batches of a step with a smaller token budget


def repeated(call: Call) -> Call:
    """Return a call that repeats ``call``, without gradients."""

    @torch.inference_mode()
    def run() -> Any:
        for _ in range(20):
            output = call()
        return [output.float()]

    return run


def layer_weights(bench: Bench) -> list[torch.Tensor]:
    """Return the weights of the linear layers of a decoder layer."""
    layer = bench.backend.reference.module.language_model.base_model.layers[0]
    modules = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    return [torch.randn(m.out_features, m.in_features, dtype=bench.dtype) * 0.02 for m in modules]


def prepacked(weights: Sequence[torch.Tensor], rows: int, packs: bool) -> tuple[Call, Call]:
    """Return products of ``rows`` rows in oneDNN's layout and unchanged; ``packs``: with the time of packing."""
    plain = torch.ops.mkldnn._linear_pointwise.default
    pack = torch.ops.mkldnn._reorder_linear_weight
    inputs = [torch.randn(rows, weight.shape[1], dtype=weight.dtype) for weight in weights]
    packed = [pack(weight) for weight in weights]

    def with_it() -> torch.Tensor:
        used = [pack(weight) for weight in weights] if packs else packed
        return torch.cat([plain(x, w, None, "none", [], "").ravel() for x, w in zip(inputs, used, strict=True)])

    def without() -> torch.Tensor:
        return torch.cat([F.linear(x, w).ravel() for x, w in zip(inputs, weights, strict=True)])

    return repeated(with_it), repeated(without)


def trainer_products(bench: Bench) -> tuple[Call, Call]:
    """Return the products of a layer over the tokens of a step, with packing, as the weights change in each step."""
    micro = collate(bench.scored.batch, range(len(bench.scored.batch)), torch.device("cpu"))
    return prepacked(layer_weights(bench), len(micro.input_ids), packs=True)


def packed_head(bench: Bench) -> tuple[Call, Call]:
    """Return the head's product over one row per sample."""
    head = bench.runner.model.get_output_embeddings().weight
    return prepacked([head], len(bench.scored.batch), packs=False)


def joined_projections(bench: Bench) -> tuple[Call, Call]:
    """Return one product for query, key and value, and one for each, in oneDNN's layout."""
    weights = layer_weights(bench)[:3]
    x = torch.randn(len(bench.scored.batch), weights[0].shape[1], dtype=bench.dtype)
    run = torch.ops.mkldnn._linear_pointwise.default
    pack = torch.ops.mkldnn._reorder_linear_weight
    joined, each = pack(torch.cat(weights)), [pack(weight) for weight in weights]
    one = repeated(lambda: run(x, joined, None, "none", [], ""))
    return one, repeated(lambda: torch.cat([run(x, w, None, "none", [], "") for w in each], -1))


def fp32_cache(bench: Bench) -> tuple[Call, Call]:
    """Return the attention of a decoding step with keys and values in fp32, and in the engine's dtype."""
    config, rows = bench.runner.model.config, len(bench.scored.batch)
    groups, length = config.num_key_value_heads, max(bench.scored.batch.total_lengths)
    q = torch.randn(rows, groups, config.num_attention_heads // groups, config.head_dim, dtype=bench.dtype)
    shape = 2, rows, groups, length, config.head_dim
    ours = [torch.randn(shape, dtype=q.dtype) for _ in range(config.num_hidden_layers)]
    in_fp32 = [cache.float() for cache in ours]
    mask = torch.zeros(rows, 1, 1, length)

    def attend(layers: list[torch.Tensor]) -> torch.Tensor:
        dtype = layers[0].dtype
        outputs = [F.scaled_dot_product_attention(q.to(dtype), k, v, attn_mask=mask.to(dtype)) for k, v in layers]
        return torch.stack(outputs).to(q.dtype)

    return repeated(lambda: attend(in_fp32)), repeated(lambda: attend(ours))


def one_norm(bench: Bench) -> tuple[Call, Call]:
    """Return the norm of a decoding step by ``F.rms_norm``, and the engine's."""
    norm = bench.runner.model.model.norm
    x = torch.randn(len(bench.scored.batch), len(norm.weight), dtype=bench.dtype)
    ours = fused_layers._Norm(norm)
    theirs = partial(F.rms_norm, normalized_shape=x.shape[1:], weight=norm.weight, eps=norm.variance_epsilon)
    return repeated(lambda: theirs(x)), repeated(lambda: ours(x))


def decoder_layer(bench: Bench) -> type:
    """Return the class of the trainer's decoder layers, without what FSDP2 adds to it."""
    layer = type(bench.backend.policy.module.language_model.base_model.layers[0])
    return next(kind for kind in layer.__mro__ if "forward" in vars(kind))


_compiled: dict[type, Callable[..., Any]] = {}


def compiled_layers(bench: Bench) -> AbstractContextManager[Any]:
    """Compile the trainer's decoder layers."""
    kind = decoder_layer(bench)
    if kind not in _compiled:
        _compiled[kind] = torch.compile(kind.forward, dynamic=False)
    return patched(kind, "forward", _compiled[kind])


def engine_log_probs(bench: Bench) -> AbstractContextManager[Any]:
    """Train as with ``--use-rollout-logprobs``."""
    loss = replace(bench.settings.loss, use_rollout_logprobs=True)
    return mock.patch.object(bench, "trainer", Trainer(bench.backend, loss, 1))


def passes(tokens: Sequence[int], first: int) -> int:
    """Return how many passes prompt lookup takes for the tokens from ``first`` on.

    The tokens that followed the last two, where these occurred before, are proposed; those that were drawn are kept.

    >>> passes([1, 2, 3, 4, 5, 6], 2), passes([1, 2, 3, 4, 1, 2, 3, 4, 9], 6)
    (4, 1)
    """
    at, count = first, 0
    while at < len(tokens):
        last = tuple(tokens[at - 2 : at])
        match = next((i for i in range(at - 2, 1, -1) if tuple(tokens[i - 2 : i]) == last), at)
        accepted = 0
        while accepted < DRAFTS and match + accepted < at and at + accepted < len(tokens) - 1:
            if tokens[match + accepted] != tokens[at + accepted]:
                break
            accepted += 1
        at, count = at + accepted + 1, count + 1
    return count


def tokens_per_pass(bench: Bench) -> float:
    """Return how many tokens a pass would have generated, over all recorded samples; the first is of the prefill."""
    samples = [s for groups in bench.iterations for group in groups for s in group.samples if len(s.response_ids) > 1]
    taken = sum(passes([*s.prompt.token_ids, *s.response_ids], len(s.prompt.token_ids) + 1) for s in samples)
    return sum(len(s.response_ids) - 1 for s in samples) / taken


def longer_decoding(bench: Bench) -> tuple[Call, Call]:
    """Return a decoding step of the rows with drafts, and one of a token per sample."""
    rows, length = len(bench.scored.batch), max(bench.scored.batch.total_lengths)

    def decode(count: int) -> Call:
        return lambda: [bench.runner.decode([1] * count, [length - 1] * count, length)]

    bench.runner.cache.clear()
    return decode(rows * (1 + DRAFTS)), decode(rows)


def micro_batch_tokens(bench: Bench) -> tuple[int, int]:
    """Return the tokens of a step in one micro-batch, and in several of a smaller budget."""
    batch = bench.scored.batch

    def count(samples: Sequence[int]) -> int:
        return len(collate(batch, samples, torch.device("cpu")).input_ids)

    whole = count(range(len(batch)))
    smaller = replace(bench.settings.training, max_tokens_per_gpu=max(whole // BUDGETS, max(batch.total_lengths)))
    (shard,) = schedule_step(batch, 1, smaller, bench.settings.parallel)
    return whole, sum(count(plan.samples) for plan in shard.micro_batches)


BOTH = ("forward and backward", "log-probs")
# Blocks above 2 MiB are returned, as on a host with less than 16 GiB. An empty value means that there is none.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(2 << 20), "MALLOC_TRIM_THRESHOLD_": ""}
JEMALLOC = str(Path(ray.__file__).parent / "core" / "libjemalloc.so")

TRIED = (
    Lever(
        "`--use-rollout-logprobs`",
        ("two steps",),
        "the engine's log-probs are the old ones, a flag that also changes the objective",
        engine_log_probs,
    ),
    Lever(
        "a large `MALLOC_MMAP_THRESHOLD_` alone",
        ("forward and backward",),
        "glibc still trims the end of its heap",
        environment={"MALLOC_MMAP_THRESHOLD_": str(64 << 30), "MALLOC_TRIM_THRESHOLD_": ""},
    ),
    Lever(
        "huge pages (`THP_MEM_ALLOC_ENABLE=1`)",
        ("forward and backward",),
        "for PyTorch's blocks, with blocks above 2 MiB returned",
        environment=RETURNED | {"THP_MEM_ALLOC_ENABLE": "1"},
    ),
    Lever(
        "jemalloc, as Ray ships it",
        ("forward and backward",),
        "instead of glibc's malloc",
        environment=RETURNED | {"LD_PRELOAD": JEMALLOC},
    ),
    Lever(
        "`torch.compile` of the decoder layers",
        ("forward and backward",),
        "compiled again for each number of tokens",
        compiled_layers,
    ),
    Lever(
        "products in oneDNN's layout in the trainer",
        ("products of a layer",),
        "with the time of packing, as weights change in each step",
        pair=trainer_products,
    ),
    Lever(
        "the head in oneDNN's layout",
        ("the head",),
        "without the time of packing, a second copy of the embedding",
        pair=packed_head,
    ),
    Lever(
        "one product for query, key and value",
        ("these products",),
        "instead of three, which are a small part of a step",
        pair=joined_projections,
    ),
    Lever("an fp32 cache of keys and values", ("attention",), "twice the memory", pair=fp32_cache, half=True),
    Lever("`F.rms_norm` in the engine", ("a norm",), "rounds otherwise than the trainer's", pair=one_norm),
    Lever(
        "prompt lookup",
        ("decoding, per token",),
        f"{DRAFTS} proposed tokens are checked in a pass; the recorded samples', with a row for each sample",
        pair=longer_decoding,
        tokens_per_pass=tokens_per_pass,
    ),
    Lever(
        "shared tokens across micro-batches",
        ("tokens of a step",),
        f"computed once in a step of about {BUDGETS} micro-batches",
        tokens=micro_batch_tokens,
    ),
)
