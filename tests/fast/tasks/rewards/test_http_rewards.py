"""Rewards over HTTP, against real servers on this machine: batches, retries, back-pressure, the judge's cache."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from miles.base.text import InputError
from miles.tasks.rewards.base import NotAReward
from miles.tasks.rewards.built_in.judge import TEMPLATE, JudgeFlags, JudgeScorer, ReplyCache, last_score
from miles.tasks.rewards.built_in.remote_rm import RemoteRmFlags, RemoteScorer
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments

KEY = "sk-very-secret-12345"


@contextmanager
def serving(handler):
    """Serve with ``handler`` on a free port; yield the base URL."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@contextmanager
def server(answer):
    """Serve ``answer(path, headers, body) -> (status, value[, headers])`` on a free port; yield the base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, value, *more = answer(self.path, self.headers, body)
            text = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, content in {"Content-Length": str(len(text)), **(more[0] if more else {})}.items():
                self.send_header(name, content)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with serving(Handler) as url:
        yield url


def remote(url, **flags):
    return RemoteScorer(RemoteRmFlags(rm_url=url, **flags), first_wait=0.001)


async def test_each_answer_is_sent_with_what_a_reward_needs(make_sample):
    def answer(path, headers, body):
        assert path == "/score?a=1" and body["prompt"] == "question" and body["metadata"] == {"k": 1}
        return 200, {"reward": float(body["response"] == body["label"])}

    with server(answer) as url:
        samples = [make_sample(r, "\ud800x", metadata={"k": 1}) for r in ("\ud800x", "y")]
        assert await remote(f"{url}/score?a=1")(samples) == [1.0, 0.0]


async def test_batches_are_lists_of_the_size_asked_for(make_sample):
    sizes = []

    def answer(path, headers, body):
        sizes.append(len(body))
        return 200, [len(row["response"]) for row in body]

    with server(answer) as url:
        samples = [make_sample("x" * n) for n in range(5)]
        assert await remote(url, rm_url_batch_size=2)(samples) == [0, 1, 2, 3, 4]
    assert sorted(sizes) == [1, 2, 2]


async def test_a_busy_server_is_asked_again_and_a_refusal_is_not(make_sample):
    seen = {"busy": 0, "refused": 0, "never": 0}

    def answer(path, headers, body):
        kind = body["response"]
        seen[kind] += 1
        if kind == "busy":
            return (503, "wait", {"Retry-After": "0"}) if seen[kind] < 3 else (200, 1)
        return (400, "no such prompt") if kind == "refused" else (500, "broken")

    with server(answer) as url:
        samples = [make_sample(kind) for kind in seen]
        good, refused, never = await remote(url, rm_url_retries=2)(samples)
    assert good == 1 and seen == {"busy": 3, "refused": 1, "never": 3}
    assert isinstance(refused, NotAReward) and "status 400" in refused
    assert isinstance(never, NotAReward) and "status 500" in never and "attempt 3 of 3" in never


async def test_a_server_that_gives_no_answer_is_not_said_to_have_answered(make_sample):
    with socket.socket() as not_listening, server(lambda *_: (200, 1)) as url:
        not_listening.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{not_listening.getsockname()[1]}"
        [failure] = await remote(unreachable, rm_url_retries=0)([make_sample("x")])
        [late] = await remote(url, rm_url_retries=0, rm_url_timeout=1e-9)([make_sample("x")])
    assert isinstance(failure, NotAReward) and " gave no answer (ConnectError: " in failure
    assert isinstance(late, NotAReward) and " gave no answer (TimeoutError) (attempt 1 of 1)" in late


@pytest.mark.parametrize("kind", ["remote_rm", "judge"])
async def test_no_more_requests_at_a_time_than_allowed(make_sample, kind):
    lock, now, most, both = threading.Lock(), 0, 0, threading.Barrier(2)

    def answer(path, headers, body):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        both.wait(30)  # answered in pairs: two requests are in flight, and the next ones wait
        with lock:
            now -= 1
        return (200, 1) if kind == "remote_rm" else reply("Score: 10")

    with server(answer) as url:
        flags = {"rm_url": url, "rm_url_concurrency": 6}
        if kind == "judge":
            flags = {"judge_url": url, "judge_model": "m", "judge_concurrency": 6}
        scorer = get_reward_function(RewardArguments(rm_type=kind, **flags), share=lambda total: total // 3)
        assert await scorer([make_sample(str(i)) for i in range(8)]) == [1] * 8
    assert most == 2


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        ("good", "got str 'good'"),
        (True, "got bool True"),
        (None, "got NoneType None"),
        ({"score": 1}, "without reward of --rm-url-field"),
        ({"reward": "1"}, "got str '1'"),
        (b"<html>", "not JSON"),
        (b"NaN", "not a finite number"),
        (b"1e400", "not a finite number"),
        (b"1" + b"0" * 400, "not a finite number"),
        (b"[" * 9999, "nested more than"),
    ],
)
async def test_what_is_no_number_is_a_failure_of_the_answer(make_sample, reply, fault):
    with server(lambda *_: (200, reply)) as url:
        (reward,) = await remote(url)([make_sample("x")])
    assert isinstance(reward, NotAReward) and fault in reward


@contextmanager
def endless_server(head):
    """Answer each request with ``head`` and a body that does not end; yield the URL, and the bytes sent so far."""
    sent = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            with suppress(OSError):
                self.wfile.write(head + b"\r\n\r\n")
                while sum(sent) < 1 << 30:
                    sent.append(self.wfile.write(b" " * (1 << 20)))

        def log_message(self, *_):
            pass

    with serving(Handler) as url:
        yield f"{url}/?token={KEY}", sent


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (b"HTTP/1.1 200 OK", "answered with more than 8 MiB; answer with the rewards alone"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip", "answered with the Content-Encoding gzip; answer without one"),
        (b"HTTP/1.1 404 Not found", "answered with status 404: "),
        (b"HTTP/1.1 500 Broken", "answered with status 500: "),
    ],
)
@pytest.mark.parametrize("kind", ["remote_rm", "judge"])
async def test_no_more_of_a_long_reply_is_read_than_a_reward_can_be(make_sample, kind, head, fault):
    with endless_server(head) as (url, sent):
        scorer = remote(url, rm_url_retries=0) if kind == "remote_rm" else judge(url, judge_retries=0)
        (reward,) = await scorer([make_sample("x")])
    assert isinstance(reward, NotAReward) and fault in reward and "127.0.0.1" in reward and KEY not in reward
    assert sum(sent) < 100 << 20, "what waits in the sockets besides"


async def test_only_the_given_host_is_contacted_and_secrets_are_not_shown(make_sample, monkeypatch):
    contacted = []

    def elsewhere(path, headers, body):
        contacted.append(path)
        return 200, 1

    with server(elsewhere) as other, server(lambda *_: (307, "moved", {"Location": other})) as url:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, other)
        (reward,) = await remote(f"{url}/?token={KEY}")([make_sample("x")])
    assert not contacted and isinstance(reward, NotAReward)
    assert "status 307" in reward and KEY not in reward


async def test_a_server_that_is_gone_fails_each_answer(make_sample):
    with server(lambda *_: (200, 1)) as url:
        pass
    rewards = await remote(url, rm_url_retries=1)([make_sample("x")] * 2)
    assert all(isinstance(reward, NotAReward) and "ConnectError" in reward for reward in rewards)


@pytest.mark.parametrize("url", ["localhost:80/x", "ftp://host/x", "http://", "http://h:99999/"])
def test_a_url_that_is_none(url):
    with pytest.raises(ValueError, match="--rm-url .* is no http URL with a host"):
        get_reward_function(RewardArguments(rm_type="remote_rm", rm_url=url))
    with pytest.raises(ValueError, match="--rm-url is required"):
        get_reward_function(RewardArguments(rm_type="remote_rm"))


def judge(url, **flags):
    return JudgeScorer(JudgeFlags(judge_url=f"{url}/v1/", judge_model="m", **flags), first_wait=0.001)


def reply(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_the_judge_is_asked_once_per_answer_also_by_the_next_run(make_sample, tmp_path):
    asked = []

    def answer(path, headers, body):
        assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
        assert body["model"] == "m" and body["temperature"] == 0
        asked.append(body["messages"][0]["content"])
        return reply(f"<think>Score: 9</think>\nScore: {len(asked) * 2}.")

    cache = str(tmp_path / "replies.sqlite")
    with server(answer) as url:
        first = judge(url, judge_api_key=KEY, judge_cache=cache)
        same = [make_sample("4", "4")] * 3
        assert await first(same) == [0.2] * 3 and await first([make_sample("5", "4")]) == [0.4]
        assert await judge(url, judge_api_key=KEY, judge_cache=cache)(same) == [0.2] * 3
    assert len(asked) == 2 and "question" in asked[0]


async def test_the_judge_is_asked_for_so_many_tokens_and_so_often(make_sample):
    asked = []

    def answer(path, headers, body):
        asked.append(body["max_tokens"])
        return 503, "busy"

    with server(answer) as url:
        (reward,) = await judge(url, judge_max_tokens=7, judge_retries=1)([make_sample("x")])
    assert asked == [7, 7] and isinstance(reward, NotAReward)


@pytest.mark.parametrize("kind", ["remote_rm", "judge"])
async def test_an_attempt_that_takes_too_long_fails(make_sample, kind):
    over = threading.Event()

    def answer(*_):
        over.wait(30)
        return 200, 1

    with server(answer) as url:
        slow = dict(rm_url_timeout=0.1, rm_url_retries=0), dict(judge_timeout=0.1, judge_retries=0)
        scorer = remote(url, **slow[0]) if kind == "remote_rm" else judge(url, **slow[1])
        try:
            (reward,) = await scorer([make_sample("x")])
        finally:
            over.set()
    assert isinstance(reward, NotAReward) and "imeout" in reward


async def test_an_answer_cannot_fill_in_the_template(make_sample, tmp_path):
    (tmp_path / "template.txt").write_text("{label}|{response}|{max_score}|{other}")
    asked = []

    def answer(path, headers, body):
        asked.append(body["messages"][0]["content"])
        return reply("Score: 1")

    with server(answer) as url:
        scorer = judge(url, judge_template=str(tmp_path / "template.txt"), judge_max_score=1.0)
        assert await scorer([make_sample("{label}{prompt}", "secret")]) == [1.0]
    assert asked == ["secret|{label}{prompt}|1|{other}"]


async def test_a_reply_without_a_score_in_range_is_a_failure_of_the_answer(make_sample):
    replies = {"none": "I cannot.", "high": "Score: 11", "low": "Score: -1", "shape": None}

    def answer(path, headers, body):
        kind = next(kind for kind in replies if f"\n{kind}\n" in body["messages"][0]["content"])
        return (200, {"error": KEY}) if replies[kind] is None else reply(replies[kind])

    with server(answer) as url:
        none, high, low, shape = await judge(url, judge_api_key=KEY)([make_sample(kind) for kind in replies])
    assert "without a line 'Score: N'" in none and "score 11, outside 0 to" in high and "score -1" in low
    assert isinstance(shape, NotAReward) and KEY not in shape


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 3\nno:\n**Score: 7.5**/10", 7.5),
        ("SCORE = -1", -1.0),
        ("Score: 3\n(max score 10)", 3.0),
        ("Score: 3\nmax score: 10", 3.0),
        ("## Final score: 3 out of 10 (max score: 10).\r\n", 3.0),
        ("Score: `3`", 3.0),
        ("Score\N{FULLWIDTH COLON}\N{FULLWIDTH DIGIT THREE}", 3.0),
        ("`Score: 3`", None),  # a quotation
        ("Score: 3 or 4", None),
        ("It scores high, say score 10", None),
        ("<think>Score: 9</think> none", None),
        ("Score: 12345678901", None),
        ("Score: ten", None),
        ("", None),
    ],
)
def test_the_last_score_counts(reply, score):
    assert last_score(reply) == last_score(reply, 10) == score


@pytest.mark.parametrize("of", [1, 4, 5, 10, 100])
def test_a_score_of_another_best_score_is_in_proportion(of):
    assert last_score(f"Score: 3/10\n**Score: {of / 4}** out of {of}", 10) == 2.5
    assert last_score("Score: 1/0", 10) is None


async def test_a_reply_without_a_score_is_asked_for_again(make_sample):
    replies = iter(["I cannot.", "Score: 11", "Score: 5"])
    with server(lambda *_: reply(next(replies))) as url:
        scorer = judge(url)
        rewards = [(await scorer([make_sample("x")]))[0] for _ in range(4)]
    assert rewards[2:] == [0.5, 0.5] and all(isinstance(reward, NotAReward) for reward in rewards[:2])


async def test_a_locked_cache_is_a_miss_that_is_logged_once(make_sample, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("miles.tasks.rewards.built_in.judge._BUSY_SECONDS", 0.0)
    threads = set()
    execute = ReplyCache._execute
    spy = lambda *words: threads.add(threading.get_ident()) or execute(*words)  # noqa: E731
    monkeypatch.setattr(ReplyCache, "_execute", spy)
    with server(lambda *_: reply("Score: 5")) as url, closing(sqlite3.connect(tmp_path / "cache")) as other:
        scorer = judge(url, judge_cache=str(tmp_path / "cache"))
        other.execute("BEGIN EXCLUSIVE")
        assert await scorer([make_sample("x"), make_sample("y")]) == [0.5, 0.5]
    assert caplog.text.count("database is locked; the judge is asked instead") == 1
    assert threading.get_ident() not in threads and len(threads) == 1


def test_faults_of_the_judges_files(tmp_path):
    (tmp_path / "template.txt").write_text("Grade it.")
    with pytest.raises(InputError, match="does not show the answer; write {response}"):
        judge("http://h", judge_template=str(tmp_path / "template.txt"))
    with pytest.raises(InputError, match="--judge-cache .*cannot be opened"):
        judge("http://h", judge_cache=str(tmp_path / "none" / "cache"))
    assert all(place in TEMPLATE for place in ("{prompt}", "{response}", "{label}", "{max_score}"))


def test_two_callers_of_one_request_share_it(make_sample):
    """Also if the first of them is cancelled meanwhile."""
    started, go = threading.Event(), threading.Event()

    def answer(path, headers, body):
        started.set()
        assert go.wait(30)
        return reply("Score: 5")

    async def calls(url):
        scorer = judge(url)
        first = asyncio.ensure_future(scorer([make_sample("x")]))
        await asyncio.to_thread(started.wait, 30)
        second = asyncio.ensure_future(scorer([make_sample("x")]))
        await asyncio.sleep(0)
        first.cancel()
        go.set()
        return await second

    with server(answer) as url:
        assert asyncio.run(calls(url)) == [0.5]
