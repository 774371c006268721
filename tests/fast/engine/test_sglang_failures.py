"""One of two real servers behind the router fails. ``test_engine_failures`` has more cases with fake servers."""

import asyncio
import signal

import httpx
import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.servers.keys import bearer
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.router import Router
from miles.types.weights import in_chunks
from tests.fast.engine.faulty_proxy import FaultyProxy
from tests.fast.engine.sglang_servers import HOST, KEYS, LocalServer, engine_of, log_probs_of, other_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.0)
PROMPTS = [(n, n + 1) for n in range(4, 28)]
CHECKS = {"rollout_health_check_interval": 2.0, "rollout_health_check_timeout": 20.0}


class FaultyServer(LocalServer):
    """A real server behind a proxy that can corrupt its answers."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.proxy = FaultyProxy()

    async def start(self):
        return await self.proxy.before(await super().start())

    async def stop(self):
        await super().stop()
        await self.proxy.close()

    async def fail(self, fault):
        """Cause ``fault`` in the server itself, or in the proxy if it is one of the proxy's."""
        if isinstance(fault, signal.Signals):
            self.signal(fault)
        elif fault == "weights lost":
            async with httpx.AsyncClient(base_url=self.url, timeout=60, headers=bearer(KEYS.admin)) as http:
                (await http.post("/weights_checker", json={"action": "reset_tensors"})).raise_for_status()
                body = {"new_version": "0", "abort_all_requests": False}
                (await http.post("/update_weight_version", json=body)).raise_for_status()
        else:
            self.proxy.fault = fault


class Pair:
    """Two servers and the engine over them, with weights that differ from those on disk."""

    def __init__(self, folder, tmp_path):
        self.loop = asyncio.new_event_loop()
        self.model = other_weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        self.servers = [FaultyServer(number, folder, tmp_path) for number in range(2)]
        self.router = Router((), HOST, LogFile(tmp_path / "router.log"), 1024, KEYS)
        vocab = self.model.config.vocab_size
        self.engine = engine_of(self.servers, vocab, tmp_path, self.router, use_fault_tolerance=True, **CHECKS)
        self.run(self._start())

    async def _start(self):
        await self.engine.start()
        await self.engine.update_weights(list(in_chunks(self.model.named_parameters())), 7)

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, 900))

    def ask(self):
        requests = [GenerationRequest(prompt, (0,), SAMPLING) for prompt in PROMPTS]
        return [asyncio.ensure_future(self.engine.generate(request)) for request in requests]

    def check(self, answers):
        """Check that there is one answer per prompt, in order, from the weights that were sent."""
        for prompt, [answer] in zip(PROMPTS, answers, strict=True):
            assert set(answer.token_versions) == {7}
            wanted = log_probs_of(self.model, prompt, answer.token_ids)
            assert torch.tensor(answer.log_probs).double() == pytest.approx(wanted, abs=SERVER_LOG_PROB_ERROR)


@pytest.fixture(scope="module")
def pair(tiny_model, tmp_path_factory):
    pair = Pair(tiny_model, tmp_path_factory.mktemp("pair"))
    yield pair
    pair.run(pair.engine.close())


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, "500", "garbage", "weights lost"])
def test_failed_server_is_replaced_and_every_request_answered_once(pair, fault):
    async def scenario():
        failing = pair.servers[0]
        starts = failing.starts
        asked = pair.ask()
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)  # some are answered, the others in flight
        await failing.fail(fault)
        answers = await asyncio.gather(*asked, *pair.ask())
        while failing.starts == starts or len(pair.engine.servers.in_use) < 2:
            pair.check(await asyncio.gather(*pair.ask()))  # a fault of answers is found by asking
        return answers, await asyncio.gather(*pair.ask())

    answers, later = pair.run(scenario())
    pair.check(answers[: len(PROMPTS)])
    pair.check(answers[len(PROMPTS) :])
    pair.check(later)
    assert pair.servers[1].starts == 1


def test_the_router_uses_both(pair):
    pair.run(_all(pair))
    served = [server.server._log.path.read_text().count("POST /generate") for server in pair.servers]
    assert min(served) >= len(PROMPTS) // 2 - 2


async def _all(pair):
    pair.check(await asyncio.gather(*pair.ask()))
