"""``kill -9`` at random moments: the run continues, and no prompt is lost or counted twice."""

import json
import random
from collections import Counter

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

PROMPTS = 12  # four per iteration, which has two optimizer steps
SERVERS = ["--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]
SGLANG = ["--rollout-engine", "sglang", *SERVERS, "--rollout-num-gpus", "2"]
CHECKS = ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "30"]
TITLES = {
    "engine": ("sglang::scheduler", "sglang_on_cpu"),
    "engine actor": ("ray::EngineActor",),
    "router": ("sglang::router",),
    "rollout worker": ("ray::RolloutActor",),
}


def kill_one(run, kind, rng):
    """Send SIGKILL to a process of this kind. Wait for one first, as the run may be replacing the last one."""
    processes = []

    def is_one(process):
        try:
            return any(title in " ".join(process.cmdline()) for title in TITLES[kind])
        except psutil.NoSuchProcess:  # it ended meanwhile
            return False

    def one_lives():
        processes[:] = [process for process in run.left() if is_one(process)]
        return bool(processes)

    run.wait_until(one_lives)
    rng.choice(processes).kill()


def run_and_kill(launch, workplace, name, rollouts, kinds, *flags):
    """Run for ``rollouts`` iterations, and kill one process of each of ``kinds``, one after another."""
    rng = random.Random(0)
    saved = ["--save-debug-rollout-data", str(workplace / (name + "_{iteration}.jsonl"))]
    run = launch(name, "--use-fault-tolerance", *flags, *saved, "--num-rollout", str(rollouts))
    moments = sorted(rng.sample(range(2, 2 * rollouts - 4), len(kinds)))  # optimizer steps
    rng.shuffle(kinds)
    for moment, kind in zip(moments, kinds, strict=True):
        run.wait_until(lambda at=moment: run.has_rows() and max(run.rows()) >= at, seconds=600)
        kill_one(run, kind, rng)
    assert run.wait() == 0, run.err
    assert run.err.count("the rollout worker died") == kinds.count("rollout worker"), run.err
    return run


def assert_each_prompt_counted_once(run, workplace, name, rollouts):
    assert sorted(run.rows()) == list(range(1, 2 * rollouts + 1))
    groups, prompts = [], Counter()
    for iteration in range(rollouts):
        for line in (workplace / f"{name}_{iteration}.jsonl").read_text().splitlines():
            group = json.loads(line)
            groups.append(group["group_index"])
            prompts[group["prompt"]["text"]] += 1
            for sample in group["samples"]:
                assert set(sample["weight_versions"]) == {iteration}
    assert groups == list(range(4 * rollouts))
    assert sum(prompts.values()) == 4 * rollouts and len(prompts) == PROMPTS
    assert max(prompts.values()) - min(prompts.values()) <= 1, "each pass over the prompts has each of them once"
    assert run.none_left(seconds=60), run.left()


def test_engines_and_rollout_worker_are_killed_over_50_rollouts(launch, workplace):
    kinds = ["rollout worker"] * 2 + ["engine"] * 5
    run = run_and_kill(launch, workplace, "kills", 50, kinds, *SGLANG, *CHECKS)
    assert_each_prompt_counted_once(run, workplace, "kills", 50)
    logs = [(run.output / "engines" / f"engine_{number}.log").read_text() for number in range(2)]
    # Two at the start, two with each new worker, and one for most kills: a kill may hit a server that is starting.
    assert sum(log.count("server_args=") for log in logs) >= 2 + 2 * 2 + 2


def test_router_and_engine_actor_are_killed(launch, workplace):
    run = run_and_kill(launch, workplace, "others", 8, ["router", "engine actor"], *SGLANG, *CHECKS)
    assert_each_prompt_counted_once(run, workplace, "others", 8)


def test_rollout_worker_with_the_embedded_engine_is_killed(launch, workplace):
    run = run_and_kill(launch, workplace, "embedded", 8, ["rollout worker"] * 2)
    assert_each_prompt_counted_once(run, workplace, "embedded", 8)
