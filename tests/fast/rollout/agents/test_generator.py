"""Programs run for trajectories: their input, their end and their failures."""

import asyncio
import json
import os
import shlex
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from tolerance import log_prob_error
from transformers import AutoModelForCausalLM

from miles.base.text import InputError
from miles.base.tokenizer import load_tokenizer
from miles.config.settings import Settings
from miles.engine.base import SamplingParams
from miles.engine.embedded.torch_engine import TorchEngine
from miles.rollout.agents.generator import AgentGenerator, time_is_up
from miles.rollout.groups import GroupSpec, response_seed
from miles.tasks.rewards.scoring import RewardError, score
from miles.types.sample import Prompt, PromptGroup, SampleStatus

# What all programs share. It knows nothing of miles: OpenAI's API, the environment and standard input.
CLIENT = """
import http.client, json, os, sys

row = json.load(sys.stdin)

def chat(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "gpt-4o", "messages": messages}).encode()
    host, _, path = os.environ["OPENAI_BASE_URL"].partition("://")[2].partition("/")
    connection = http.client.HTTPConnection(host)
    connection.request("POST", f"/{path}/chat/completions", body, headers)
    response = connection.getresponse()
    answer = json.load(response)
    assert response.status == 200, answer
    return answer["choices"][0]["message"]
"""
TWO_TURNS = """
messages = [{"role": "user", "content": row["input"]}]
messages += [chat(messages), {"role": "user", "content": "ab"}]
chat(messages)
print("noise\\n\\nanswer to " + row["input"] + " " + row["label"] + " " + str(row["metadata"]["n"]) + "\\n")
"""


# Without the packages of this environment, which a program starts faster without.
PYTHON = (sys.executable, "-I", "-S")


@pytest.fixture
def agents(tmp_path):
    """Return ``agents(source, **flags)``: a generator that runs this program."""
    made = []

    def make(source, **flags):
        path = tmp_path / f"agent_{len(made)}.py"
        path.write_text(CLIENT + source)
        command = shlex.join([*PYTHON, str(path)])
        settings = Settings()
        made.append(
            AgentGenerator(replace(settings, rollout=replace(settings.rollout, agent_command=command, **flags)))
        )
        return made[-1]

    return make


async def generate(agents, engine, tokenizer, n_samples=2, max_new=1000, max_context=2000):
    prompt = Prompt("the task", (1, 2), "42", {"n": 7}, "set.jsonl:7", input="the task")
    try:
        spec = GroupSpec(SamplingParams(max_new), n_samples, response_seed, max_context)
        return await asyncio.wait_for(agents(PromptGroup(3, prompt), engine, tokenizer, spec), 120)
    finally:
        await agents.close()


async def test_a_program_makes_a_trajectory(agents, random_engine, chat_tokenizer):
    engine = random_engine()
    group = await generate(agents(TWO_TURNS), engine, chat_tokenizer)
    assert [s.trajectory_id for s in group.samples] == [6, 7]
    assert {s.response for s in group.samples} == {"answer to the task 42 7"}
    assert {s.failure for s in group.samples} == {""}
    assert sum(sum(s.loss_mask) for s in group.samples) == sum(len(g.token_ids) for _, g in engine.answers)


async def test_without_output_the_last_message_is_the_answer(agents, random_engine, chat_tokenizer):
    quiet = TWO_TURNS.replace("print", "str")
    group = await generate(agents(quiet), random_engine(texts=["a", "b", "c", "d"]), chat_tokenizer)
    assert {s.response for s in group.samples} <= set("bcd")


async def test_log_probs_are_those_of_the_model_over_the_whole_conversation(agents, tiny_model):
    """With the real engine: the model computes the recorded log-probs from the samples that are trained on."""
    engine = TorchEngine(tiny_model, torch.float32, "cpu", 8)
    group = await generate(agents(TWO_TURNS), engine, load_tokenizer(tiny_model), max_new=60, max_context=120)
    await engine.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).requires_grad_(False)
    for sample in group.samples:
        ids = torch.tensor([sample.tokens])
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        logits = model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        tolerance = log_prob_error(model, ids, 1.0)
        log_probs = torch.tensor(sample.rollout_log_probs)
        torch.testing.assert_close(log_probs[mask], expected[mask], atol=tolerance, rtol=0)
        assert 0 in sample.loss_mask and sample.num_loss_tokens > 1


FAILURES = [
    (
        "chat([]) if 0 else chat([{'role': 'user', 'content': 'x'}]); sys.exit('no such column')",
        "exited with status 1.*no such column",
    ),
    ("print('done')", "made no call that was answered"),
    ("chat([{'role': 'user', 'content': 'x'}]); os.kill(os.getpid(), 9)", "killed by signal 9"),
]


@pytest.mark.parametrize(("source", "fault"), FAILURES)
async def test_a_program_that_fails_fails_like_a_reward(agents, random_engine, chat_tokenizer, source, fault):
    group = await generate(agents(source), random_engine(), chat_tokenizer, n_samples=1)

    async def reward(samples):
        raise AssertionError("it is not called with them")

    with pytest.raises(
        RewardError, match=f"--agent-command.*{fault}.*set.jsonl:7, group 3, trajectory 3.*--reward-error"
    ):
        await score(group.samples, reward, None)
    assert await score(group.samples, reward, -1.0) == 1 and group.samples[0].reward == -1.0
    assert await score(group.samples, reward, None, drop=True) == 1 and group.samples[0].reward is None


async def test_a_failed_trajectory_leaves_the_others_scored(agents, random_engine, chat_tokenizer, tmp_path):
    once = f"""
chat([{{"role": "user", "content": "x"}}])
try:
    os.mkdir({str(tmp_path / "first")!r})
except FileExistsError:
    sys.exit(3)
print("fine")
"""
    group = await generate(agents(once, agent_concurrency=1), random_engine(), chat_tokenizer, n_samples=3)

    async def reward(samples):
        return [float(sample.response == "fine") for sample in samples]

    assert await score(group.samples, reward, -1.0) == 2
    assert sorted(sample.reward for sample in group.samples) == [-1.0, -1.0, 1.0]


async def test_a_program_that_runs_out_of_room_is_a_truncated_answer(agents, random_engine, chat_tokenizer):
    endless = (
        "messages = []\nwhile True:\n messages += [{'role': 'user', 'content': 'abcd'}]\n messages += [chat(messages)]"
    )
    group = await generate(agents(endless), random_engine(), chat_tokenizer, max_new=200)
    assert {(s.status, s.failure) for s in group.samples} == {(SampleStatus.TRUNCATED, "")}


def time_counts_once(holds, monkeypatch):
    """Have the time of --agent-timeout begin once ``holds(session)``: a program may take long to start."""

    async def counted(session, seconds):
        while not holds(session):
            await asyncio.sleep(0.01)
        await time_is_up(session, session.own_seconds + seconds)

    monkeypatch.setattr("miles.rollout.agents.generator.time_is_up", counted)


async def test_a_program_that_hangs_without_room_is_a_truncated_answer(
    agents, random_engine, chat_tokenizer, monkeypatch
):
    time_counts_once(lambda session: session.refused_for_room, monkeypatch)
    source = """
messages = [{"role": "user", "content": "abcd"}]
messages += [chat(messages), {"role": "user", "content": "abcd" * 1000}]
try:
    chat(messages)
except AssertionError:
    import threading; threading.Event().wait()
"""
    group = await generate(agents(source, agent_timeout=0.5), random_engine(), chat_tokenizer, n_samples=1)
    [sample] = group.samples
    assert (sample.status, sample.failure) == (SampleStatus.TRUNCATED, "") and sample.response_ids


@pytest.mark.parametrize("ending", ["chat(call)", "\ntry: chat(call)\nexcept AssertionError: print('too long')"])
async def test_a_first_call_without_room_fails_and_can_be_dropped(agents, random_engine, chat_tokenizer, ending):
    source = f"call = [{{'role': 'user', 'content': 'abcd' * 1000}}]; {ending}"
    group = await generate(agents(source), random_engine(), chat_tokenizer, n_samples=1)

    async def reward(samples):
        raise AssertionError("it is not called with them")

    with pytest.raises(RewardError, match=r"--agent-command made no call .* \(--rollout-max-context-len\)"):
        await score(group.samples, reward, None)
    assert await score(group.samples, reward, None, drop=True) == 1 and group.samples[0].reward is None


async def test_no_program_starts_after_the_close(agents, random_engine, chat_tokenizer, tmp_path):
    started = tmp_path / "started"
    source = f"open({str(started)!r}, 'a').write('x')\nchat([{{'role': 'user', 'content': 'x'}}])"
    made, engine, asked = agents(source, agent_concurrency=1), random_engine(), asyncio.Event()

    async def wait(request):
        asked.set()
        await asyncio.Event().wait()

    engine.generate = wait
    task = asyncio.ensure_future(generate(made, engine, chat_tokenizer, n_samples=3))
    await asyncio.wait_for(asked.wait(), 120)
    await made.close()
    group = await task
    assert started.read_text() == "x"
    assert [(s.status, s.failure) for s in group.samples] == [(SampleStatus.ABORTED, "")] * 3


async def test_a_program_has_the_environment_without_credentials(agents, random_engine, chat_tokenizer, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "not for programs")
    monkeypatch.setenv("OPENAI_API_KEY", "not for programs")
    monkeypatch.setenv("HF_TOKEN", "not for programs")
    monkeypatch.setenv("PLACE", "here")
    source = "chat([{'role': 'user', 'content': 'x'}]); print(json.dumps(dict(os.environ)))"
    group = await generate(agents(source), random_engine(), chat_tokenizer, n_samples=1)
    environment = json.loads(group.samples[0].response)
    assert environment["PLACE"] == "here" and environment["OPENAI_API_KEY"].startswith("sk-")
    assert "not for programs" not in environment.values()


HANGS = """
import subprocess, time
chat([{"role": "user", "content": "x"}])
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
open(os.environ["PIDS"], "a").write(f"{os.getpid()} {child.pid}\\n")
chat([{"role": "user", "content": "x"}])
import threading; threading.Event().wait()
"""


def alive(path):
    pids = {int(word) for word in path.read_text().split()} if path.exists() else set()
    matches = [process for process in psutil.process_iter(["status"]) if process.pid in pids]  # passes over ended ones
    return [process for process in matches if process.info["status"] != psutil.STATUS_ZOMBIE]


async def gone(path):
    """Wait for the kernel to end what was killed."""
    await asyncio.to_thread(psutil.wait_procs, alive(path), 60)
    return not alive(path)


async def test_a_program_that_hangs_is_killed_with_its_children(
    agents, random_engine, chat_tokenizer, tmp_path, monkeypatch
):
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    time_counts_once(lambda session: pids.exists() and len(pids.read_text().split()) == 2, monkeypatch)
    group = await generate(agents(HANGS, agent_timeout=1.0), random_engine(), chat_tokenizer, n_samples=1)
    assert "took more than 1 s on its own (--agent-timeout)" in group.samples[0].failure
    assert len(pids.read_text().split()) == 2 and await gone(pids)


async def test_a_cancelled_trajectory_kills_its_program(agents, random_engine, chat_tokenizer, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    engine, both_wait = random_engine(), asyncio.Event()
    generate_at_once = engine.generate

    async def counted(request):
        if len(engine.answers) == 3:  # each program calls once before its child is started, and once after
            both_wait.set()
        return await generate_at_once(request)

    engine.generate = counted
    task = asyncio.ensure_future(generate(agents(HANGS), engine, chat_tokenizer))
    await asyncio.wait_for(both_wait.wait(), 120)
    assert len(alive(pids)) == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(pids)


async def test_at_most_so_many_programs_run_at_a_time(agents, random_engine, chat_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PIDS", str(tmp_path / "running"))
    counted = """
folder = os.environ["PIDS"]
os.makedirs(folder, exist_ok=True)
own = os.path.join(folder, str(os.getpid()))
open(own, "w").close()
number = len(os.listdir(folder))
chat([{"role": "user", "content": "x"}])
number = max(number, len(os.listdir(folder)))
os.remove(own)
print(number)
"""
    group = await generate(agents(counted, agent_concurrency=2), random_engine(), chat_tokenizer, n_samples=6)
    assert max(int(sample.response) for sample in group.samples) <= 2


async def test_what_the_engine_raises_is_raised(agents, random_engine, chat_tokenizer):
    engine = random_engine()

    async def fail(request):
        raise ValueError("the engine's own words")

    engine.generate = fail
    with pytest.raises(ValueError, match="the engine's own words"):
        await generate(agents(TWO_TURNS), engine, chat_tokenizer)


def test_a_program_that_is_not_there_is_refused():
    settings = Settings()
    rollout = replace(settings.rollout, agent_command="no-such-program --flag")
    with pytest.raises(InputError, match="--agent-command no-such-program --flag: no-such-program is no program"):
        AgentGenerator(replace(settings, rollout=rollout))


async def test_proxies_of_the_environment_are_not_used(agents, random_engine, chat_tokenizer, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    group = await generate(agents(TWO_TURNS), random_engine(), chat_tokenizer, n_samples=1)
    assert group.samples[0].failure == "" and os.environ["NO_PROXY"] == "example.org"
