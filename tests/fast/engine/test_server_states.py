"""The states of SGLang servers, tested on fake servers: their transitions, and the calls made in each."""

import asyncio
import itertools

import pytest

from miles.engine.servers.client import EngineUnavailable
from miles.engine.servers.states import IN_USE, NEXT_STATES, ManagedServer, ServerState
from tests.fast.engine.fake_servers import QUICK, WEIGHTS, FakeServer, ask, started_engine, until

pytestmark = pytest.mark.timeout(900)

PAUSE, RESUME = "/pause_generation", "/continue_generation"
RELEASE, TAKE, LOAD = "/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"
RESTARTS = {"use_fault_tolerance": True, **QUICK}


def managed(tmp_path, state):
    server = ManagedServer(FakeServer(0, tmp_path), changed=lambda: None)
    server.state = state
    return server


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(ServerState, 2)))
def test_a_server_takes_only_the_transitions_of_the_diagram(tmp_path, old, new):
    server = managed(tmp_path, old)
    if new in NEXT_STATES[old]:
        server.enter(new)
        assert server.state is new and server.changes == 1
    else:
        with pytest.raises(AssertionError, match=f"engine 0: {old.value} cannot become {new.value}"):
            server.enter(new)


@pytest.mark.parametrize("state", ServerState)
def test_only_servers_in_use_can_fail(tmp_path, state):
    """A failure that is found twice, or late, restarts a server only once."""
    server = managed(tmp_path, state)
    server.fail(RuntimeError("no answer"))
    assert server.state is (ServerState.FAILED if state in IN_USE else state)


async def test_workers_are_shown_which_weights_are_in_use(tmp_path):
    """After an update they accept no answer by the weights before it."""
    versions = []

    async def show(seen):
        versions.append((seen.version, seen.oldest))

    async with started_engine(tmp_path, 1) as (engine, _servers):
        engine.servers.show_to(show)
        await engine.update_weights(WEIGHTS, 4)
        await until(lambda: versions[-1:] == [(4, 4)])
    assert versions[0] == (4, 3)


async def test_updates_restore_the_state_of_servers(tmp_path):
    """Released memory comes back in two parts, around the weights."""
    async with started_engine(tmp_path, 1) as (engine, servers):
        [server] = engine.servers.all
        states = [server.state]
        for act in (engine.update_weights(WEIGHTS, 4), engine.release_memory(), engine.update_weights(WEIGHTS, 5)):
            await act
            states.append(server.state)
        controls = (await servers[0].seen())["controls"]
    assert states == [ServerState.SERVING, ServerState.SERVING, ServerState.RELEASED, ServerState.SERVING]
    assert controls == [
        *(PAUSE, LOAD, RESUME) * 2,  # the first was before
        RELEASE,
        *(TAKE, PAUSE, LOAD, TAKE, RESUME),
    ]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_server_that_is_not_serving_is_not_checked(tmp_path, restarts):
    """It would not answer the check, and would then be restarted or end the run."""
    flags = {"rollout_health_check_interval": 0.05, "rollout_health_check_timeout": 2.0}
    async with started_engine(tmp_path, 1, use_fault_tolerance=restarts, **flags) as (engine, servers):
        await engine.release_memory()
        before = (await servers[0].seen())["checked"]
        await asyncio.sleep(0.5)  # ten intervals
        assert (await servers[0].seen())["checked"] == before


@pytest.mark.parametrize(
    ("updated", "releases", "state", "controls"),
    [
        (True, True, ServerState.RELEASED, [RELEASE]),
        (True, False, ServerState.SERVING, [PAUSE, LOAD, RESUME]),
        (False, False, ServerState.SERVING, []),
    ],
)
async def test_a_server_that_restarts_joins_in_the_state_of_the_others(tmp_path, updated, releases, state, controls):
    async with started_engine(tmp_path, 1, updated=updated, **RESTARTS) as (engine, servers):
        [server] = engine.servers.all
        if releases:
            await engine.release_memory()
        server.fail(RuntimeError("no answer"))
        assert server.state is ServerState.FAILED
        await until(lambda: server.in_use)
        assert (servers[0].starts, server.state) == (2, state)
        assert (await servers[0].seen())["controls"] == controls


async def test_memory_is_released_when_no_check_is_in_flight(tmp_path):
    async with started_engine(tmp_path, 1) as (engine, servers):
        with engine.servers.checking():
            release = asyncio.create_task(engine.release_memory())
            assert not (await asyncio.wait([release], timeout=0.3))[0]
            assert RELEASE not in (await servers[0].seen())["controls"]
        await release
        assert (await servers[0].seen())["controls"][-1] == RELEASE


async def test_a_check_that_an_update_interrupts_is_ignored(tmp_path):
    """The server fails the check because the update paused it."""
    flags = {"rollout_health_check_interval": 0.05, "rollout_health_check_timeout": 2.0}
    async with started_engine(tmp_path, 1, use_fault_tolerance=True, **flags) as (engine, servers):
        [server] = engine.servers.all
        interruptions = []

        async def interrupted(version):
            interruptions.append(version)
            server.enter(ServerState.UPDATING)
            server.enter(ServerState.SERVING)
            raise EngineUnavailable("it was paused")

        server.client.check_health = interrupted
        await until(lambda: len(interruptions) == 3)
        del server.client.check_health
        assert servers[0].starts == 1
        assert (await ask(engine, (1, 2))).token_ids == [2, 1]


async def test_the_next_update_waits_for_a_server_that_joins(tmp_path):
    """Otherwise it would miss that update and serve the older weights."""
    async with started_engine(tmp_path, 2, **RESTARTS) as (engine, servers):
        joined = asyncio.Event()
        original = engine.router.add

        async def slow_add(url):
            await original(url)
            adding.set()
            await joined.wait()

        adding = asyncio.Event()
        engine.router.add = slow_add
        engine.servers.all[0].fail(RuntimeError("no answer"))
        await adding.wait()
        update = asyncio.create_task(engine.update_weights(WEIGHTS, 4))
        assert not (await asyncio.wait([update], timeout=0.3))[0]
        joined.set()
        await update
        assert {answer.weight_version for answer in [await ask(engine, (n,)) for n in range(8)]} == {4}
