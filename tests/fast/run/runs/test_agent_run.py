"""Complete runs with ``--agent-command``: a program that knows OpenAI's API only is trained."""

import shlex
import sys

import pytest

from tests.fast.run.runs.launches import LOCAL_RAY, is_loopback

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = """
import json, os, sys, urllib.request

def chat(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"model": "gpt-4o", "messages": messages, "max_tokens": 4}).encode()
    call = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(call))["choices"][0]["message"]

row = json.load(sys.stdin)
assert "miles" not in sys.modules and row["label"].isdigit()
messages = row["input"]
messages = [*messages, chat(messages), {"role": "user", "content": "7"}]
messages = [*messages, chat(messages)]
chat([{"role": "user", "content": "in short: " + messages[-1]["content"]}])
"""
NEEDED = ["--rollout-max-response-len", "40", "--rollout-max-context-len", "110", "--agent-concurrency", "4"]


def agent(workplace, source, name="agent.py"):
    (workplace / name).write_text(source)
    return ["--agent-command", shlex.join([sys.executable, str(workplace / name)]), *NEEDED]


@pytest.mark.parametrize("mode", [[], ["--async-steps", "1", "--fully-async"]], ids=["synchronous", "fully_async"])
def test_a_program_is_trained_in_several_samples_of_a_trajectory(launch, workplace, mode):
    name = "agent_" + (mode or ["synchronous"])[-1].strip("-")
    saved = workplace / f"{name}_{{iteration}}.jsonl"
    flags = [*agent(workplace, AGENT), "--num-rollout", "2", "--save-debug-rollout-data", str(saved), *mode]
    run = launch(name, *flags)
    run.wait_until(run.has_rows)
    listening = run.listening()
    assert listening.keys() <= LOCAL_RAY, listening
    assert all(is_loopback(address) for addresses in listening.values() for address in addresses), listening
    assert run.wait() == 0, run.err
    assert run.none_left()
    rows = run.rows()
    assert all(row["train/grad_norm"] > 0 for step, row in rows.items() if step)
    text = (workplace / f"{name}_0.jsonl").read_text()
    assert text.count('"trajectory_id"') == 2 * 16  # the summary is its own sample


def test_a_program_that_fails_stops_the_run_with_its_own_words(launch, workplace):
    flags = agent(workplace, AGENT + "\nsys.exit('the tool is not there')", "broken.py")
    run = launch("agent_broken", *flags)
    assert run.wait() != 0
    assert "--agent-command exited with status 1" in run.err and "the tool is not there" in run.err
    assert "prompts.jsonl:" in run.err and "--reward-error" in run.err
    assert run.none_left()


def test_programs_end_with_a_killed_rollout_worker(launch, workplace):
    waits = AGENT.replace("row = json", "import threading\nrow = json") + "\nthreading.Event().wait()"
    run = launch("agent_killed", *agent(workplace, waits, "waits.py"))

    def programs():
        return [pid for pid, words in run.command_lines() if any("waits.py" in word for word in words[1:3])]

    run.wait_until(lambda: len(programs()) == 4)
    assert run.kill_worker("RolloutActor")
    assert run.wait() != 0
    assert run.none_left()
