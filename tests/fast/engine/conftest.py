"""Use the suite's SGLang server as the engine of a test."""

import asyncio
import itertools
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.training.fsdp.checkpoint import as_on_disk
from miles.types.weights import in_chunks
from tests.fast.engine.sglang_servers import engine_of, other_weights


def chunks_of(model):
    return list(in_chunks(as_on_disk(model, model.named_parameters()), bucket_bytes=20_000))


class Started:
    """A server that is already running; implements ``miles.engine.base.Server``."""

    def __init__(self, address):
        self.name = f"the engine at {address}"
        self.address = address

    async def start(self):
        return f"http://{self.address}"

    async def ending(self):
        return ""

    async def stop(self):
        """Do nothing: the suite's fixture stops the server."""


class Running:
    """The server, and one engine at once that uses it, on this object's event loop."""

    def __init__(self, address, model, folder, kind=AutoModelForCausalLM, make=engine_of):
        self.loop = asyncio.new_event_loop()
        self.address = address
        self.model = kind.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
        self.other = other_weights(self.model)
        self.folder = folder
        self.make = make
        self.versions = itertools.count(100)

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 300))

    @contextmanager
    def engine(self, **flags):
        """Build an engine with these fields of ``SglangArguments``, and send ``model``'s weights to the server."""
        vocab_size = self.model.config.get_text_config().vocab_size
        engine = self.make([Started(self.address)], vocab_size, self.folder, **flags)
        self.run(engine.start())
        self.update(engine, self.model)
        yield engine
        self.run(engine.close())

    def update(self, engine, model):
        """Send ``model``'s weights and return their version."""
        version = next(self.versions)
        self.run(engine.update_weights(chunks_of(model), version))
        return version

    def generate(self, engine, prompts, seeds=1, **sampling):
        """Return all responses, prompt by prompt."""

        async def all_at_once():
            return await asyncio.gather(*(engine.generate(r) for r in requests))

        requests = [GenerationRequest(p, tuple(range(seeds)), SamplingParams(**sampling)) for p in prompts]
        return [generation for group in self.run(all_at_once()) for generation in group]


@pytest.fixture(scope="session")
def running(sglang_address, tiny_model, tmp_path_factory):
    return Running(sglang_address, tiny_model, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def engine(running):
    """Return an engine with default flags, for tests that do not change its weights."""
    with running.engine() as engine:
        yield engine
