"""The trainer and the engine of a quickstart in one process, for levers.py: parts of a step, and what changes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from backends import settings_of  # benchmarks/backends.py

from miles.base.tokenizer import load_tokenizer
from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.engine.base import SamplingParams
from miles.engine.embedded import running_batch, sampling
from miles.engine.embedded.model_runner import ModelRunner
from miles.engine.embedded.running_batch import RunningBatch
from miles.training import scoring
from miles.training.backend import build_backend
from miles.training.trainer import Trainer
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch, TrainShard

Call: TypeAlias = Callable[[], Any]
Change: TypeAlias = "Callable[[Bench], AbstractContextManager[Any]]"
Pair: TypeAlias = "Callable[[Bench], tuple[Call, Call]]"


def recorded(samples: Path, model: str) -> list[list[PromptGroup]]:
    """Return the iterations of a run's ``samples.jsonl``."""
    tokenizer = load_tokenizer(model)

    @cache
    def ids_of(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    iterations: dict[int, dict[int, PromptGroup]] = {}
    for row in map(json.loads, samples.read_text(encoding="utf-8").splitlines()):
        groups = iterations.setdefault(row["rollout_id"], {})
        prompt = Prompt(row["prompt"], ids_of(row["prompt"]))
        group = groups.setdefault(row["group"], PromptGroup(row["group"], prompt, []))
        pieces = [(ids_of(piece), value) for piece, value in zip(row["tokens"], row["rollout_log_probs"], strict=True)]
        ids = [token for tokens, _ in pieces for token in tokens]
        log_probs = [value for tokens, value in pieces for _ in tokens]
        sample = Sample(group.prompt, row["group"], row["trajectory"], response_ids=ids, loss_mask=[1] * len(ids))
        group.samples.append(replace(sample, rollout_log_probs=log_probs, reward=row["reward"]))
    return [[*groups.values()] for groups in iterations.values()]


def has_one_reward(group: PromptGroup) -> bool:
    """Return whether the samples have equal rewards, and so advantages of 0."""
    return len({sample.reward for sample in group.samples}) == 1


class Bench:
    """Trainer and engine of a quickstart in this process, and the parts of a step.

    A part prepares its work, and returns the call that is timed.
    """

    def __init__(self, model: str, iterations: Sequence[Sequence[PromptGroup]], dtype: str) -> None:
        """``iterations`` are their samples. The first is measured, and a later one with many groups of one reward."""
        self.model, self.dtype = model, getattr(torch, dtype)
        self.iterations = iterations
        self.groups = groups = iterations[0]
        self.later = next(some for some in iterations if 2 * sum(map(has_one_reward, some)) >= len(some))
        samples = [sample for group in groups for sample in group.samples]
        self.new_tokens = max(len(sample.response_ids) for sample in samples)
        shape = {"prompts": len(groups), "samples": len(groups[0].samples), "new_tokens": self.new_tokens}
        flags = {"model": model, "ranks": 1, "fsdp": "--kl-loss-coef 0", "fp32": dtype == "float32"}
        self.settings = settings_of("fsdp", argparse.Namespace(**flags, **shape))
        self.prompt_key: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple
        self._engines: dict[str, ModelRunner] = {}
        self._pairs: dict[Pair, tuple[Call, Call]] = {}

    @cached_property
    def backend(self) -> Any:
        """The trainer's models."""
        return build_backend(self.settings, torch.device("cpu"), total_steps=1000)

    @cached_property
    def trainer(self) -> Trainer:
        """The trainer."""
        return Trainer(self.backend, self.settings.loss, 1)

    @cached_property
    def runner(self) -> ModelRunner:
        """The engine's model."""
        return self.engine("unchanged", nullcontext())

    def engine(self, name: str, change: AbstractContextManager[Any]) -> ModelRunner:
        """Return a model that was built under ``change``; it is built once."""
        if name not in self._engines:
            with change:
                self._engines[name] = ModelRunner(self.model, self.dtype, "cpu")
        return self._engines[name]

    def pair(self, build: Pair) -> tuple[Call, Call]:
        """Return the calls of a lever with it and without it; they are built once."""
        if build not in self._pairs:
            self._pairs[build] = build(self)
        return self._pairs[build]

    def batches(self, groups: Sequence[PromptGroup], steps: int = 1) -> list[TrainBatch]:
        """Return the batches of an iteration that takes so many steps."""
        count = sum(len(group.samples) for group in groups)
        return convert(groups, loss=self.settings.loss, global_batch_size=count // steps)

    def shard(self, batch: TrainBatch, has_gradient: Sequence[bool] | None = None) -> TrainShard:
        """Return the shard of the only rank."""
        parts = self.settings.training, self.settings.parallel
        return schedule_step(batch, 1, *parts, has_gradient)[0]

    @cached_property
    def scored(self) -> TrainShard:
        """The samples with reference log-probs."""
        shard = self.shard(self.batches(self.groups)[0])
        of_reference = scoring.log_probs(self.backend, self.backend.reference, shard)
        return replace(shard, batch=replace(shard.batch, ref_log_probs=of_reference))

    @cached_property
    def later_shard(self) -> TrainShard:
        """The later samples. Samples of advantage 0 are not trained on."""
        batch = self.batches(self.later)[0]
        return self.shard(batch, self.trainer.objective.samples_with_gradient(batch.rewards))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer changes."""
        return [p for group in self.backend.policy.optimizer.adam.param_groups for p in group["params"]]

    def forward_backward(self) -> Call:
        """Accumulate the gradients of a step."""
        role, shard = self.trainer.policy, self.scored
        self.backend.policy.optimizer.adam.zero_grad()

        def run() -> list[torch.Tensor]:
            role.model.forward_backward(shard, role.loss_function)
            return [p.grad.to_local() for p in self.parameters]

        return run

    def log_probs(self) -> Call:
        """Score the samples under the reference."""
        shard = self.scored
        return lambda: [torch.cat([*map(torch.tensor, scoring.log_probs(self.backend, self.backend.reference, shard))])]

    @cached_property
    def _gradients(self) -> list[torch.Tensor]:
        self.forward_backward()()
        return [p.grad.clone() for p in self.parameters]

    def optimizer(self) -> Call:
        """Let AdamW step, after clipping."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient.clone()

        def run() -> list[torch.Tensor]:
            self.backend.policy.optimizer.step()
            return [p.to_local() for p in self.parameters]

        return run

    def step(self) -> Call:
        """Train on an iteration of one step: reference, forward, backward, optimizer."""
        return self._train([self.shard(self.batches(self.groups)[0])])

    def later_step(self) -> Call:
        """Do the same with the later samples."""
        return self._train([self.later_shard])

    def two_steps(self) -> Call:
        """Train on an iteration of two steps."""
        return self._train([self.shard(batch) for batch in self.batches(self.groups, steps=2)])

    def _train(self, shards: list[TrainShard]) -> Call:
        trainer = self.trainer
        return lambda: [torch.tensor([step["train/grad_norm"].value for step in trainer.train(shards)])]

    def _sequences(self) -> list[running_batch.Sequence]:
        params = SamplingParams(self.new_tokens)
        stop = self.runner.eos_ids
        prompts = [self.prompt_key(tuple(s.prompt.token_ids)) for group in self.groups for s in group.samples]
        return [running_batch.Sequence(p, params, stop, seed, 0) for seed, p in enumerate(prompts)]

    def prefill(self) -> Call:
        """Run the prompts, and draw the first token of each sample."""
        self.runner.cache.clear()
        batch, sequences = RunningBatch(self.runner), self._sequences()

        def run() -> list[torch.Tensor]:
            batch.admit(sequences, 0)
            return _generated(sequences)

        return run

    def decoding(self) -> Call:
        """Generate the other tokens."""
        self.runner.cache.clear()
        batch, sequences = RunningBatch(self.runner), self._sequences()
        batch.admit(sequences, 0)
        batch.retire()

        def run() -> list[torch.Tensor]:
            while batch.sequences:
                batch.step(0)
                batch.retire()
            return _generated(sequences)

        return run

    def drawing(self) -> Call:
        """Draw the next token of every sample, from logits after the prompts."""
        self.runner.cache.clear()
        logits = self.runner.prefill([group.prompt.token_ids for group in self.groups], 0)
        logits = logits.repeat_interleave(len(self.groups[0].samples), 0)
        rows = sampling.RowSampling.of([SamplingParams(1)] * len(logits), logits.shape[1], logits.device)
        uniforms = torch.rand(len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return lambda: [*running_batch.sample(logits, rows, uniforms)[:2]]


def _generated(sequences: Sequence[running_batch.Sequence]) -> list[torch.Tensor]:
    tokens = torch.tensor([token for s in sequences for token in s.token_ids])
    return [tokens, torch.tensor([value for s in sequences for value in s.log_probs])]


PARTS: Mapping[str, Callable[[Bench], Call]] = {
    "forward and backward": Bench.forward_backward,
    "log-probs": Bench.log_probs,
    "optimizer": Bench.optimizer,
    "a step": Bench.step,
    "a later step": Bench.later_step,
    "two steps": Bench.two_steps,
    "prefill": Bench.prefill,
    "decoding": Bench.decoding,
    "drawing": Bench.drawing,
}


@dataclass(frozen=True)
class Lever:
    """Something that makes a part of a step faster, or was meant to.

    Attributes:
        name: Its name.
        parts: The parts of a step that it changes: keys of ``PARTS``. For a pair, the names of its calls' computations.
        what: States what it does, and what happens without it.
        change: Makes a block that is without it; with it if it is one of ``TRIED``.
        environment: Variables of a process without it; with it if it is one of ``TRIED``. Alongside a ``change``, both
            ways have them.
        pair: Returns a call with it and one without it.
        tokens_per_pass: How many tokens a call with it is good for, where one without is good for one.
        tokens: Returns the tokens that are computed with it and without it, if no time is measured.
        half: Whether it concerns bf16 alone.
    """

    name: str
    parts: tuple[str, ...]
    what: str
    change: Change | None = None
    environment: Mapping[str, str] | None = None
    pair: Pair | None = None
    tokens_per_pass: Callable[[Bench], float] | None = None
    tokens: Callable[[Bench], tuple[int, int]] | None = None
    half: bool = False


@contextmanager
def patched(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class inside the block. ``LookupError``: there is none, or nobody called it."""
    before = vars(owner).get(name)
    if not callable(before):
        raise LookupError(f"{owner.__name__} has no function {name}: change the lever as the code was changed")
    calls = 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return value(*args, **named)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, before)
    if not calls:
        raise LookupError(f"nothing called {owner.__name__}.{name}: change the lever as the code was changed")


def function(owner: Any, name: str, value: Callable[..., Any]) -> Change:
    """Return the change that replaces a function."""
    return lambda bench: patched(owner, name, value)


def constant(owner: Any, name: str, value: int) -> Change:
    """Return the change that replaces a constant."""
    return lambda bench: mock.patch.object(owner, name, value)
