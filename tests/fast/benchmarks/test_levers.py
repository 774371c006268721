"""benchmarks/levers.py: each lever changes the computation, and not its result."""

import copy
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tolerance import RELATIVE_ERROR
from torch.utils._python_dispatch import TorchDispatchMode

from miles.engine.base import SamplingParams
from miles.engine.embedded import sampling
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.running_batch import RunningBatch, Sequence
from miles.objective import token_log_probs
from miles.training import packed_attention
from miles.types.sample import Prompt, PromptGroup, Sample
from tests.fast.support.benchmark_scripts import benchmark
from tests.fast.support.tiny_llama import tiny_llama

SHARED_START = [*range(20, 50)]


@pytest.fixture(scope="module")
def levers():
    return benchmark("levers")


@pytest.fixture(scope="module")
def make_bench(levers, tmp_path_factory):
    """Return the bench of a model that prefers some tokens, so that its samples begin alike."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(seed=7, initializer_range=0.4, tie_word_embeddings=True).save_pretrained(folder)
    groups = [generated(ModelRunner(str(folder), torch.float32, "cpu"), number) for number in range(4)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    benches = {}

    def bench(dtype):
        if dtype not in benches:
            benches[dtype] = levers.Bench(str(folder), [groups], dtype)
        return benches[dtype]

    yield bench
    dist.destroy_process_group()


def generated(runner, number):
    """Return four samples of a prompt; half of the groups have one reward."""
    prompt = Prompt("", (*SHARED_START, 1 + number, 2))
    sequences = [Sequence(prompt.token_ids, SamplingParams(6), frozenset(), 10 * number + i, 0) for i in range(4)]
    batch = RunningBatch(runner)
    batch.admit(sequences, 0)
    while batch.sequences:
        batch.step(0)
        batch.retire()
    samples = [
        Sample(
            prompt,
            number,
            4 * number + i,
            response_ids=s.token_ids,
            loss_mask=[1] * 6,
            rollout_log_probs=s.log_probs,
            reward=float(i if number % 2 else 1),
        )
        for i, s in enumerate(sequences)
    ]
    return PromptGroup(number, prompt, samples)


class Operations(TorchDispatchMode):
    """Count operations by name, dtypes, layouts and shapes."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(f"{a.dtype} {a.layout} {tuple(a.shape)}" for a in args if isinstance(a, torch.Tensor))
        self.counts[str(func), shapes] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def unchanged(bench):
    """Restore weights and moments, so that two passes start from the same ones."""
    adam = bench.backend.policy.optimizer.adam
    state, weights = copy.deepcopy(adam.state_dict()), [p.detach().clone() for p in bench.parameters]
    yield
    adam.load_state_dict(state)
    with torch.no_grad():
        for parameter, weight in zip(bench.parameters, weights, strict=True):
            parameter.copy_(weight)


def computed(levers, bench, name, part, with_it):
    """Return the results of a part, and the operations that it took."""
    with unchanged(bench), levers.call_of(bench, name, part, with_it) as call, Operations() as operations:
        tensors = [value.detach().clone() for value in call()]
    return tensors, operations.counts


def cases():
    named = [
        lever for lever in benchmark("levers").BY_NAME.values() if lever.change is not None or lever.pair is not None
    ]
    return [pytest.param(lever, part, id=f"{lever.name}, {part}") for lever in named for part in lever.parts]


COMPILED = "`torch.compile` of the decoder layers"
OTHER_ROWS = "prompt lookup"  # the calls of this pair decode other rows


@pytest.fixture
def small_caches(monkeypatch):
    """Blocks of a few rows of the tiny model."""
    monkeypatch.setattr(token_log_probs, "CACHED_BYTES", 3 * 4 * 64)
    monkeypatch.setattr(sampling, "CACHED_BYTES", 3 * 4 * 256)
    monkeypatch.setattr(packed_attention, "CACHED_BYTES", 1)


@pytest.mark.slow
@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize(("lever", "part"), cases())
def test_a_lever_changes_the_operations_and_not_the_result(levers, make_bench, lever, part):
    if lever.name == COMPILED:
        pytest.skip("compilation takes a compiler and many seconds")
    bench = make_bench("bfloat16" if lever.half else "float32")
    (with_it, operations), (without, others) = (computed(levers, bench, lever.name, part, way) for way in (True, False))
    assert operations != others
    if lever.name != OTHER_ROWS:
        tolerance = 0.05 if lever.half else RELATIVE_ERROR
        for a, b in zip(with_it, without, strict=True):
            assert (a - b).double().norm() <= tolerance * max(1e-6, b.double().norm())


def test_a_replacement_that_the_code_no_longer_has_or_calls_is_refused(levers):
    with pytest.raises(LookupError, match="no function gone"), levers.patched(sampling, "gone", lambda: None):
        pass
    with (
        pytest.raises(LookupError, match=r"nothing called .*sampling\.sample"),
        levers.patched(sampling, "sample", lambda: None),
    ):
        pass
    with pytest.raises(AttributeError, match="GONE"):
        levers.constant(sampling, "GONE", 1)(None).__enter__()
    assert sampling.sample.__module__ == sampling.__name__


def test_levers_of_the_optimizer_and_of_gradients_refuse_a_backend_without_them(levers, make_bench):
    bench = make_bench("float32")
    groups = bench.backend.policy.optimizer.adam.param_groups
    groups[0]["fused"] = False
    try:
        with pytest.raises(LookupError, match="not fused"), levers.adamw(bench, foreach=True):
            pass
    finally:
        groups[0]["fused"] = True
    with (
        levers.copied_gradients(bench),
        pytest.raises(LookupError, match="NothingToReduce"),
        levers.copied_gradients(bench),
    ):
        pass


def test_only_whole_equal_prompts_are_shared_without_the_sharing_of_beginnings(levers, make_bench):
    bench = make_bench("float32")
    (batch,) = bench.batches(bench.groups)
    samples, lengths = len(batch), np.asarray(batch.total_lengths)
    token_indices = [
        share(batch, lengths)[1] for share in (levers._share_prefixes, levers.prompts_shared, levers.nothing_shared)
    ]
    prompt = len(bench.groups[0].prompt.token_ids)
    assert len(token_indices[1]) == len(bench.groups) * prompt + 6 * samples
    assert len(token_indices[2]) == sum(lengths)
    assert len(token_indices[0]) < len(token_indices[1])
