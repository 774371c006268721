"""The keys of servers and router: their source, who needs them, and that nobody else sees them."""

import httpx
import psutil
import pytest

from miles.config.servers.passed_on import ServerFlags
from miles.engine.servers.client import RequestRefused
from miles.engine.servers.keys import Keys, bearer, keys_of
from miles.engine.sglang.client import SglangClient
from miles.engine.sglang.launch import ExternalServer, SglangProgram
from tests.fast.engine.fake_servers import KEYS, FakeServer, ask, started_engine

SECRETS = (KEYS.server, KEYS.admin, KEYS.router)


def test_every_run_makes_its_own_keys():
    keys = [key for _ in range(2) for key in vars(keys_of(ServerFlags(), external=False)).values()]
    assert len(set(keys)) == 6
    assert all(int(key, 16) < 2**256 and len(key) == 64 for key in keys)  # so none begins with "-", as a flag does


def test_keys_of_the_user_are_used():
    flags = ServerFlags(("--dtype", "float32", "--api-key", "one", "--admin-api-key=two"), ("--api-key", "three"))
    assert keys_of(flags, external=False) == Keys("one", "two", "three")
    assert keys_of(flags, external=True) == Keys("one", "two", "three")


def test_external_servers_have_the_keys_that_are_given():
    none = keys_of(ServerFlags(), external=True)
    assert (none.server, none.admin) == (None, None) and none.router
    only = keys_of(ServerFlags(("--api-key", "one")), external=True)
    assert (only.server, only.admin) == ("one", "one")


def test_keys_are_in_no_representation():
    spec = SglangProgram("m", "float32", "cpu", 1, seed=0, flags=("--ssl-keyfile-password", "sesame"), keys=KEYS)
    assert not any(secret in repr((KEYS, spec)) for secret in (*SECRETS, "sesame"))


def test_words_with_secrets_are_not_among_the_arguments():
    spec = SglangProgram("m", "float32", "cpu", 1, seed=0, flags=("--ssl-keyfile-password", "sesame", "--x"), keys=KEYS)
    assert not {"sesame", *SECRETS} & set(spec.arguments("h", 1))
    assert "--x" in spec.arguments("h", 1)
    assert spec.secret_arguments == [
        *("--ssl-keyfile-password", "sesame", "--api-key", KEYS.server),
        *("--admin-api-key", KEYS.admin),
    ]


async def test_requests_need_their_keys_and_nobody_sees_them(tmp_path):
    """Two servers behind the real router. Fake servers demand the keys as SGLang does."""
    others = set(psutil.Process().children(recursive=True))  # of earlier tests in this process
    async with started_engine(tmp_path, 2) as (engine, servers):
        assert (await ask(engine, (1, 2))).token_ids == [2, 1]
        family = [process for process in psutil.Process().children(recursive=True) if process not in others]
        seen = [" ".join(process.cmdline()) + str(process.environ()) for process in family]
        assert len(family) >= 3 and not any(secret in text for secret in SECRETS for text in seen)
        listening = {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        async with httpx.AsyncClient() as http:
            for headers, status in (({}, 401), (bearer(KEYS.server), 401), (bearer(KEYS.router), 200)):
                answer = await http.post(f"{engine.router.url}/generate", json={"input_ids": [1]}, headers=headers)
                assert answer.status_code == status
                assert (await http.get(f"{engine.router.url}/workers", headers=headers)).status_code == status
        wrong = SglangClient(servers[0].url, 1, 30.0, key=KEYS.server, admin_key=KEYS.server)
        with pytest.raises(RequestRefused, match=r"HTTP 401: .* give .*--sglang-api-key and --sglang-admin-api-key"):
            await wrong.pause("retract")
        await wrong.check_health(version=3)
        await wrong.close()
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert len(logs) == 3 and not any(secret in text for secret in SECRETS for text in logs)


async def test_an_external_server_with_another_key_is_reported_at_once(tmp_path):
    server = FakeServer(0, tmp_path)
    address = (await server.start()).removeprefix("http://")
    try:
        with pytest.raises(ValueError, match=f"--rollout-external-engine-addrs http://{address}: .*another key"):
            await ExternalServer(address).start()
        assert await ExternalServer(address, KEYS).start() == f"http://{address}"
    finally:
        await server.stop()
