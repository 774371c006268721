"""Requests when servers fail, with real processes that are killed, stopped, or answer wrongly.

The processes are fake SGLang servers that start at once (``fake_server``). ``test_sglang_failures`` has one test of
each kind with the real server.
"""

import asyncio
import itertools
import os
import random
import signal

import pytest

from miles.engine.base import EngineFailed, GenerationRequest, SamplingParams
from tests.fast.engine.fake_servers import QUICK, WEIGHTS, ask, started_engine, until

pytestmark = pytest.mark.timeout(900)


def kill(server):
    server.signal(signal.SIGKILL)


def stop(server):
    server.signal(signal.SIGSTOP)


FAULTS = ["killed", "stopped", "500", "garbage", "unsound", "unhealthy", "loses weights"]
OFTEN = ("killed", "stopped", "500", "loses weights")  # the others, which corrupt answers in other ways, are slow
BEHIND_A_ROUTER = [pytest.param(fault, 2, marks=() if fault in OFTEN else pytest.mark.slow) for fault in FAULTS]


async def break_server(server, fault):
    if fault == "killed":
        kill(server)
    elif fault == "stopped":
        stop(server)
    else:
        await server.misbehave(fault)


@pytest.mark.parametrize(("fault", "num_servers"), BEHIND_A_ROUTER)
async def test_failed_server_is_replaced_and_nothing_is_lost(tmp_path, fault, num_servers):
    """Requests before, during and after the fault are answered exactly once, by servers with the current weights."""
    async with started_engine(tmp_path, num_servers, use_fault_tolerance=True, **QUICK) as (engine, servers):
        prompts = [(n, n + 1, n + 2) for n in range(60)]
        asked = [asyncio.ensure_future(ask(engine, prompt)) for prompt in prompts[:40]]
        await break_server(servers[0], fault)
        asked += [asyncio.ensure_future(ask(engine, prompt)) for prompt in prompts[40:]]
        answers = await asyncio.gather(*asked)
        await until(lambda: servers[0].starts >= 2 and len(engine.servers.in_use) == num_servers)
        answers.append(await ask(engine, (1, 2)))
    assert [answer.token_ids for answer in answers] == [list(p[::-1]) for p in [*prompts, (1, 2)]]
    assert all(answer.weight_version == 3 for answer in answers)


@pytest.mark.parametrize("num_servers", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["direct", "routed"])
async def test_kills_at_random_moments(tmp_path, num_servers):
    """Run many iterations of many prompts; the answers equal the answers of a run without failures."""
    rng = random.Random(0)
    killed_after = set(rng.sample(range(120), 4))  # numbers of answers
    flags = {"use_fault_tolerance": True, "sglang_server_concurrency": 4, **QUICK}
    async with started_engine(tmp_path, num_servers, **flags) as (engine, servers):
        answered = itertools.count(1)

        async def ask_and_kill(prompt):
            answer = await ask(engine, prompt)
            in_use = [server.process for server in engine.servers.in_use]
            if next(answered) in killed_after and in_use:
                kill(rng.choice(in_use))
            return answer

        rollouts = []
        for version in range(4, 7):
            await engine.update_weights(WEIGHTS, version)
            rollouts.append(await asyncio.gather(*(ask_and_kill((version, n)) for n in range(40))))
        assert sum(server.starts for server in servers) > 2, "too few servers were killed"
    for version, rollout in enumerate(rollouts, start=4):
        assert [answer.token_ids for answer in rollout] == [[n, version] for n in range(40)]
        assert {answer.weight_version for answer in rollout} == {version}


async def test_without_fault_tolerance_a_server_that_fails_ends_the_run_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.engine.servers.requests.BACK_OFF_SECONDS", 0.01)
    async with started_engine(tmp_path, 1) as (engine, servers):
        await servers[0].misbehave("500")
        with pytest.raises(EngineFailed, match="failed 8 times, .* HTTP 500 .*with --use-fault-tolerance engines that"):
            await ask(engine, (1,))


@pytest.mark.parametrize("found_by", ["a request", "a weight update", "a health check"])
async def test_without_fault_tolerance_the_reason_names_the_signal_that_ended_a_server(tmp_path, caplog, found_by):
    """Also if there is another server: the next weight update would end the run."""
    quick = {"rollout_health_check_interval": 0.1} if found_by == "a health check" else {}
    async with started_engine(tmp_path, 1 + (found_by == "a request"), **quick) as (engine, servers):
        kill(servers[0])
        what = "engine 0 did not take the weights" if found_by == "a weight update" else "engine 0"
        reason = rf"^{what}: its process ended by SIGKILL \(.*\); the server's log .* with --use-fault-tolerance "
        with pytest.raises(EngineFailed, match=reason):
            if found_by == "a weight update":
                await engine.update_weights(WEIGHTS, 4)
            if found_by == "a health check":
                await until(lambda: engine.servers._end)
            await asyncio.gather(*(ask(engine, (n,)) for n in range(20)))
    assert "the run stops in" not in caplog.text


@pytest.mark.parametrize("routed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["direct", "routed"])
async def test_without_fault_tolerance_a_server_that_hangs_ends_the_wait(tmp_path, caplog, routed):
    """Nothing answers and nothing fails, so only health checks can notice."""
    async with started_engine(tmp_path, 1 + routed, unresponsive_seconds=1.5, **QUICK) as (engine, servers):
        for server in servers:
            stop(server)
        asked = [asyncio.ensure_future(ask(engine, (n,))) for n in range(4)]
        await asyncio.wait(asked)
        for request in asked:
            with pytest.raises(RuntimeError, match=r"engine \d has passed no health check for \d+ s .*Timeout"):
                request.result()
        with pytest.raises(RuntimeError, match="no health check"):
            await ask(engine, (1,))
    assert "does not pass its health check" in caplog.text
    assert "the run stops in 1.5 s (--worker-timeout); with --use-fault-tolerance it would" in caplog.text


async def test_without_fault_tolerance_a_server_that_continues_is_waited_for(tmp_path, caplog):
    flags = {"rollout_health_check_interval": 0.1, "rollout_health_check_timeout": 0.5}
    async with started_engine(tmp_path, 1, unresponsive_seconds=100, **flags) as (engine, servers):
        stop(servers[0])
        asked = asyncio.ensure_future(ask(engine, (1, 2)))
        await until(lambda: "does not pass" in caplog.text)
        servers[0].signal(signal.SIGCONT)
        await until(lambda: "passes its health check again" in caplog.text)
        assert (await asked).token_ids == [2, 1]


async def test_before_the_first_update_any_weights_are_accepted(tmp_path):
    """A server that was started by someone else calls its weights "default"."""
    async with started_engine(tmp_path, 1, updated=False, use_fault_tolerance=True, **QUICK) as (engine, servers):
        await servers[0].misbehave("foreign weights")
        checks = (await servers[0].seen())["checked"]
        while (await servers[0].seen())["checked"] < checks + 3:
            await asyncio.sleep(0.02)
        early = await ask(engine, (1, 2))
        await engine.update_weights(WEIGHTS, 3)
        assert servers[0].starts == 1
        late = await ask(engine, (1, 2))
    assert early.token_ids == late.token_ids == [2, 1] and late.weight_version == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_router_that_fails_is_replaced_and_nothing_is_lost(tmp_path, number):
    flags = {"use_fault_tolerance": True, "sglang_server_concurrency": 2, **QUICK}
    async with started_engine(tmp_path, 2, **flags) as (engine, servers):
        first = engine.router.pid
        asked = [asyncio.ensure_future(ask(engine, (n, 1))) for n in range(40)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        os.kill(engine.router.pid, number)
        asked += [asyncio.ensure_future(ask(engine, (n, 1))) for n in range(40, 60)]
        answers = await asyncio.gather(*asked)
        assert engine.router.pid != first and [server.starts for server in servers] == [1, 1]
    assert [answer.token_ids for answer in answers] == [[1, n] for n in range(60)]


@pytest.mark.slow
async def test_without_fault_tolerance_a_router_that_hangs_ends_the_wait(tmp_path):
    async with started_engine(tmp_path, 2, unresponsive_seconds=1.0, **QUICK) as (engine, servers):
        os.kill(engine.router.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="the router has passed no health check"):
            await ask(engine, (1,))


async def test_requests_to_a_server_that_hangs_and_is_not_ours_go_to_another(tmp_path):
    """It keeps its connections, so that the router waits for its answers."""
    async with started_engine(tmp_path, 2, use_fault_tolerance=True, **QUICK) as (engine, servers):
        ours = servers[0].stop, servers[0].start

        async def leave():
            pass

        async def wait():
            await asyncio.Event().wait()

        servers[0].stop, servers[0].start = leave, wait
        stop(servers[0])
        try:
            answers = await asyncio.gather(*(ask(engine, (n, 1)) for n in range(8)))
        finally:
            servers[0].stop, servers[0].start = ours
    assert [answer.token_ids for answer in answers] == [[1, n] for n in range(8)]


async def test_server_that_fails_to_restart_is_given_up(tmp_path):
    async with started_engine(tmp_path, 1, use_fault_tolerance=True, **QUICK) as (engine, servers):

        async def refuse():
            raise OSError("no such device")

        servers[0].start = refuse
        kill(servers[0])
        with pytest.raises(RuntimeError, match=r"no engine is left \(engine 0: no such device\)"):
            await ask(engine, (1,))


async def test_a_server_gets_an_update_that_it_missed_when_it_restarts(tmp_path):
    async with started_engine(tmp_path, 2, use_fault_tolerance=True, **QUICK) as (engine, servers):
        kill(servers[0])
        await engine.update_weights(WEIGHTS, 5)  # finds the dead server and restarts it
        await until(lambda: len(engine.servers.in_use) == 2)
        assert [server.starts for server in servers] == [2, 1]
        answers = await asyncio.gather(*(ask(engine, (n,)) for n in range(10)))
    assert {answer.weight_version for answer in answers} == {5}


async def test_requests_are_spread_over_the_servers(tmp_path):
    async with started_engine(tmp_path, 3, sglang_server_concurrency=2) as (engine, servers):
        await asyncio.gather(*(ask(engine, (n,)) for n in range(60)))
        served = [(await server.seen())["served"] for server in servers]
    assert sum(served) == 60 and min(served) >= 10


async def test_requests_with_fields_that_the_router_drops_go_past_it(tmp_path):
    """They are spread over the servers, and the engine gets the data that it asks for."""
    sampling = SamplingParams(max_new_tokens=8, returns_support=True, returns_experts=True, stop_texts=("1.",))
    async with started_engine(tmp_path, 2) as (engine, servers):
        before = [(await server.seen())["served"] for server in servers]
        request = GenerationRequest((1, 2, 3), tuple(range(6)), sampling)
        for generation in await engine.generate(request):
            assert [one.tolist() for one in generation.support.sets()] == [[0, 3], [0, 2], [0, 1]]
            assert generation.log_probs == [-0.5] * 3
            assert generation.experts.shape == (5, 2, 1) and (generation.experts == 1).all()
        seen = [await server.seen() for server in servers]
        assert [server["served"] - n for server, n in zip(seen, before, strict=True)] == [3, 3]
        assert [server["stops"] for server in seen] == [["1\\."] * 3] * 2
