"""benchmarks/levers.py: each lever changes what is computed, and not the result."""

import copy
import importlib
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from miles.engine.base import SamplingParams
from miles.engine.embedded import sampling
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.running_batch import RunningBatch, Sequence
from miles.objective import token_log_probs
from miles.sample import Prompt, PromptGroup, Sample
from tests.fast.support.tiny_llama import tiny_llama

FOLDER = Path(__file__).parents[3] / "benchmarks"
SHARED_START = [*range(20, 50)]


@pytest.fixture(scope="module")
def levers():
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("levers")
    finally:
        sys.path.remove(str(FOLDER))


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
    sequences = [Sequence.start(prompt.token_ids, SamplingParams(6), frozenset(), 10 * number + i, 0) for i in range(4)]
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
    """Count operations by name and shapes."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(str(a.layout) + str(tuple(a.shape)) for a in args if isinstance(a, torch.Tensor))
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
        found = [value.detach().clone() for value in call()]
    return found, operations.counts


def cases():
    sys.path.insert(0, str(FOLDER))
    try:
        found = importlib.import_module("levers")
    finally:
        sys.path.remove(str(FOLDER))
    named = [lever for lever in found.BY_NAME.values() if lever.environment is None and lever.tokens is None]
    return [pytest.param(lever, part, id=f"{lever.name}, {part}") for lever in named for part in lever.parts]


COMPILED = "`torch.compile` of the decoder layers"
OTHER_WORK = {"prompt lookup"}  # the calls of this pair compute other rows


@pytest.fixture
def small_caches(monkeypatch):
    """Blocks of a few rows of the tiny model."""
    monkeypatch.setattr(token_log_probs, "CACHED_BYTES", 3 * 4 * 64)
    monkeypatch.setattr(sampling, "CACHED_BYTES", 3 * 4 * 256)


@pytest.mark.usefixtures("small_caches")
@pytest.mark.parametrize(("lever", "part"), cases())
def test_a_lever_changes_the_operations_and_not_the_result(levers, make_bench, lever, part):
    if lever.name == COMPILED:
        pytest.skip("compilation takes a compiler and many seconds")
    bench = make_bench("bfloat16" if lever.half else "float32")
    (with_it, operations), (without, others) = (computed(levers, bench, lever.name, part, way) for way in (True, False))
    assert operations != others
    if lever.name not in OTHER_WORK:
        tolerance = 0.05 if lever.half else 1e-4
        for a, b in zip(with_it, without, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1e-6, b.abs().max().item()))
