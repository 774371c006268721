"""``kill -9`` at random moments over 50 rollouts: the run goes on, and no prompt is lost or counted twice."""

import json
import random
from collections import Counter

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ROLLOUTS, PROMPTS, KILLS = 50, 12, 7
SERVERS = ["--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]
FLAGS = ["--rollout-engine", "sglang", *SERVERS, "--rollout-num-gpus", "2", "--use-fault-tolerance"]
CHECKS = ["--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "30"]
TITLES = {"engine": ("sglang::scheduler", "sglang_on_cpu"), "rollout worker": ("ray::RolloutWorker",)}


def kill_one(run, kind, rng):
    """SIGKILL a process of this kind; the run may be about to replace the last one, so one is awaited."""
    found = []

    def one_lives():
        found[:] = [process for process in run.left() if any(t in " ".join(process.cmdline()) for t in TITLES[kind])]
        return bool(found)

    run.wait_until(one_lives)
    rng.choice(found).kill()


def test_no_prompt_is_lost_or_counted_twice(launch, workplace):
    rng = random.Random(0)
    saved = ["--save-debug-rollout-data", str(workplace / "killed_{rollout_id}.jsonl")]
    run = launch("kills", *FLAGS, *CHECKS, *saved, "--num-rollout", str(ROLLOUTS))
    moments = sorted(rng.sample(range(2, 2 * ROLLOUTS - 4), KILLS))  # optimizer steps: two a rollout
    kinds = ["rollout worker", "rollout worker", *["engine"] * (KILLS - 2)]
    rng.shuffle(kinds)
    for moment, kind in zip(moments, kinds, strict=True):
        run.wait_until(lambda at=moment: run.has_rows() and max(run.rows()) >= at, seconds=600)
        kill_one(run, kind, rng)
    assert run.wait() == 0, run.err
    assert sorted(run.rows()) == list(range(1, 2 * ROLLOUTS + 1))
    assert run.err.count("the rollout worker died") == 2
    logs = [(run.output / "engines" / f"engine_{number}.log").read_text() for number in range(2)]
    assert sum(log.count("server_args=") for log in logs) >= 2 + 2 * 2 + 2, "too few engines were started again"

    groups, prompts = [], Counter()
    for rollout_id in range(ROLLOUTS):
        for line in (workplace / f"killed_{rollout_id}.jsonl").read_text().splitlines():
            group = json.loads(line)
            groups.append(group["group_index"])
            prompts[group["prompt"]["text"]] += 1
            for sample in group["samples"]:
                assert set(sample["weight_versions"]) == {rollout_id}
    assert groups == list(range(4 * ROLLOUTS))
    assert sum(prompts.values()) == 4 * ROLLOUTS and len(prompts) == PROMPTS
    assert max(prompts.values()) - min(prompts.values()) <= 1, "each pass over the prompts has each of them once"
    assert run.none_left()
