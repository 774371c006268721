"""``train.py --rollout-engine vllm`` with real Ray, vLLM servers and trainer; skipped without their environment."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR
from transformers import AutoModelForCausalLM

from miles.base.processes import kill_group
from miles.config.vllm.environment import clean_environment, missing_vllm, vllm_python
from miles.engine.servers.launch import answers
from miles.engine.servers.leftovers import open_segments
from miles.engine.servers.processes import free_port
from tests.fast.conftest import VLLM_SHAPE, save_tiny_model
from tests.fast.engine.sglang_servers import log_probs_of
from tests.fast.run.runs.launches import LOCAL_RAY, VLLM_SERVER, is_loopback, kind_of
from tests.fast.run.runs.test_agent_run import AGENT, agent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing_vllm(vllm_python()) is not None, reason="vLLM is missing: bash scripts/vllm.sh"),
]
OF_VLLM = {"ray::EngineActor", VLLM_SERVER, "VLLM::EngineCore", "ray::GenerationActor"}


@pytest.fixture(scope="module")
def start(launch, workplace, tmp_path_factory):
    """Return ``start(name, *flags)``: a run with vLLM that saves the groups of each iteration."""
    model = tmp_path_factory.mktemp("of_vllm")
    save_tiny_model(model, **VLLM_SHAPE, max_position_embeddings=512)

    def started(name, *flags, **more):
        flags = ["--rollout-engine", "vllm", "--hf-checkpoint", str(model), "--rollout-max-response-len", "40", *flags]
        saved = ["--save-debug-rollout-data", str(workplace / (name + "_{iteration}.jsonl"))]
        return launch(name, *flags, *saved, **more)

    return started


def groups_of(workplace, name, rollouts):
    files = [workplace / f"{name}_{iteration}.jsonl" for iteration in range(rollouts)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def versions(groups):
    return {version for group in groups for sample in group["samples"] for version in sample["weight_versions"]}


def servers_of(run):
    return [process for process in run.left() if kind_of(process) == VLLM_SERVER]


def test_two_servers_serve_a_run_that_never_waits_and_one_is_killed(start, workplace):
    """Fully asynchronous, with a merged adapter, evaluation and two processes that send requests."""
    held = ["--eval-prompt-data", "held", str(workplace / "prompts.jsonl"), "--eval-interval", "2"]
    adapter = ["--lora-rank", "4", "--lora-alpha", "8", "--lr", "1e-2"]
    flags = ["--async-steps", "1", "--fully-async", "--rollout-num-gpus", "2", "--num-rollout-workers", "2"]
    run = start("vllm_ahead", *flags, *held, *adapter, "--use-fault-tolerance")
    run.wait_until(run.has_rows)
    listening = run.listening()
    assert listening.keys() <= LOCAL_RAY | OF_VLLM, listening
    assert all(is_loopback(address) for addresses in listening.values() for address in addresses), listening
    segments = open_segments(run.left())
    server = servers_of(run)[0]
    os.killpg(server.pid, signal.SIGKILL)
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert sorted(rows) == list(range(13)) and "eval/held/reward" in rows[12]
    assert all(row["train/grad_norm"] > 0 for step, row in rows.items() if step)
    assert rows[1]["train/train_rollout_logprob_abs_diff"] < SERVER_LOG_PROB_ERROR
    groups = groups_of(workplace, "vllm_ahead", 6)
    taken = [group["group_index"] for iteration in groups for group in iteration]
    assert len(set(taken)) == len(taken) == 24
    assert all(versions(iteration) <= {n - 1, n} for n, iteration in enumerate(groups) if n)
    assert run.none_left() and segments and not any(Path(segment).exists() for segment in segments)


def test_a_run_that_a_killed_server_has_ended_resumes_from_its_last_checkpoint(start, workplace):
    """With partial rollouts, whose reasoning is interrupted, and weights in shared memory."""
    saving = ["--save", str(workplace / "vllm_ckpt"), "--save-interval", "1"]
    flags = ["--partial-rollout", "--over-sampling-batch-size", "8", "--thinking-max-len", "8", *saving]
    flags += ["--thinking-end", "</t>", "--thinking-interruption", "</t>", "--update-weight-transfer-mode", "ipc"]
    run = start("vllm_partial", *flags)
    run.wait_until(lambda: (workplace / "vllm_ckpt" / "iter_0000002").exists())
    segments = open_segments(run.left())
    os.killpg(servers_of(run)[0].pid, signal.SIGKILL)
    assert run.wait() == 1 and "engine 0: its process ended by SIGKILL (" in run.err.splitlines()[-1], run.err
    assert run.none_left() and segments and not any(Path(segment).exists() for segment in segments)
    resumed = start("vllm_partial", *flags, "--load", str(workplace / "vllm_ckpt"))
    assert resumed.wait() == 0, resumed.err
    rows, groups = resumed.rows(), groups_of(workplace, "vllm_partial", 6)
    assert sorted(rows) == list(range(1, 13)) and resumed.none_left()
    taken = [group["group_index"] for iteration in groups for group in iteration]
    assert len(set(taken)) == len(taken) == 24
    assert any(len(versions([group])) > 1 for iteration in groups for group in iteration), "one was continued"
    interrupted = [s for it in groups for group in it for s in group["samples"] if 0 in (s["loss_mask"] or [])]
    assert interrupted and all("</t>" in sample["response"] for sample in interrupted)


@pytest.fixture
def teacher(tmp_path):
    """Return a model of other weights, and the address of a vLLM server for it that a user has started."""
    save_tiny_model(tmp_path / "model", **VLLM_SHAPE, initializer_range=0.2)
    port, log = free_port("127.0.0.1"), tmp_path / "log"
    words = ["--model", tmp_path / "model", "--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    words += ["--host", "127.0.0.1", "--port", port]
    few = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [vllm_python(), "-m", VLLM_SERVER, *map(str, words)]
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, env=clean_environment() | few, stdout=out, stderr=out, start_new_session=True
        ) as process,
    ):
        try:
            while not answers(url := f"http://127.0.0.1:{port}", "/health"):
                assert process.poll() is None, log.read_text()
                time.sleep(0.5)
            yield AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), f"{url}/v1"
        finally:
            kill_group(process.pid)


def test_a_teacher_in_a_server_of_vllm_is_followed(start, workplace, teacher):
    model, address = teacher
    flags = ["--use-opd", "--opd-teacher-urls", address, "--custom-rm-path", "miles.tasks.rewards.built_in.zero:zero"]
    run = start("vllm_opd", *flags, "--num-rollout", "2")
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert sorted(rows) == [1, 2, 3, 4]
    assert all(row["train/opd_kl"] > 0 and row["train/grad_norm"] > 0 for row in rows.values())
    for group in groups_of(workplace, "vllm_opd", 2)[1]:
        for sample in group["samples"]:
            expected = log_probs_of(model, group["prompt"]["token_ids"], sample["response_ids"])
            assert sample["teacher_log_probs"] == pytest.approx(expected.tolist(), abs=SERVER_LOG_PROB_ERROR)


def test_a_program_is_trained_by_copies_of_deltas(start, workplace):
    """Tokens go in and come out: the second turn's prompt has the first turn's tokens."""
    flags = ["--update-weight-transfer-mode", "disk-delta", "--check-weight-update-equal", "--num-rollout", "3"]
    run = start("vllm_agent", *agent(workplace, AGENT), *flags)
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert all(rows[step]["train/train_rollout_logprob_abs_diff"] < SERVER_LOG_PROB_ERROR for step in (1, 3, 5))
    assert (workplace / "vllm_agent_0.jsonl").read_text().count('"trajectory_id"') == 2 * 16
    assert run.none_left()
