"""Real SGLang servers of the tiny model, shared by several test modules."""

import asyncio
import os
import signal

import psutil
import torch

from miles.config.servers.flags import SglangArguments
from miles.config.servers.passed_on import ServerFlags
from miles.engine.servers.keys import keys_of
from miles.engine.servers.launch import ServerOnHost
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.engine import SglangEngine
from miles.engine.sglang.launch import SglangProgram
from miles.engine.weight_sync.sender import WeightSender

HOST = "127.0.0.1"
KEYS = keys_of(ServerFlags(), external=False)
# A cache as small as the model, because servers of several tests run at the same time.
SMALL = ("--max-total-tokens", "4096", "--max-running-requests", "32")


def server_of(model, log, seed=0, reads_text=False, devices=1, host=HOST):
    spec = SglangProgram(model, "float32", "cpu", devices, seed=seed, flags=SMALL, keys=KEYS, reads_text=reads_text)
    return ServerOnHost(spec, LogFile(log), host)


class LocalServer:
    """A server started by this process; implements ``miles.engine.base.Server``. Tests can signal its processes."""

    def __init__(self, number, model, log_folder):
        self.name = f"engine {number}"
        self.server = server_of(model, log_folder / f"engine_{number}.log", seed=number)
        self.starts = 0

    async def start(self):
        self.starts += 1
        self.url = await asyncio.to_thread(self.server.start)
        return self.url

    async def ending(self):
        return await asyncio.to_thread(self.server.ending)

    async def stop(self):
        await asyncio.to_thread(self.server.stop)

    def signal(self, number=signal.SIGKILL):
        """Send a signal to every process of the server."""
        leader = psutil.Process(self.server.pid)
        for process in (*leader.children(recursive=True), leader):
            os.kill(process.pid, number)


def engine_of(servers, vocab_size, output_dir, router=None, **flags):
    """Build the engine over ``servers``; ``flags`` are fields of ``SglangArguments``."""
    sglang = SglangArguments(**flags)
    return SglangEngine(servers, sglang, vocab_size, WeightSender(sglang, output_dir), router, keys=KEYS)


def log_probs_of(model, prompt, token_ids, temperature=1.0):
    """Return float64 log-probs of a response under a Hugging Face model, from one forward pass."""
    ids = torch.tensor([[*prompt, *token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def log_probs_with_old_cache(old, new, prompt, tokens, switch):
    """Return log-probs if the new model generates from ``switch`` on with the old model's keys and values."""
    ids = torch.tensor([[*prompt, *tokens]])
    read = len(prompt) + switch - 1  # the new model reads the last token before the switch
    with torch.no_grad():
        first = old(ids[:, :read], use_cache=True)
        rest = new(ids[:, read:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, rest.logits], 1)[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def other_weights(model):
    """Return a model of the same shape with other weights."""
    torch.manual_seed(7)
    return type(model)(model.config).requires_grad_(False)
