"""A run with --profile writes one trace of all its processes, and a table."""

import gzip
import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPANS = {
    "fsdp": {"micro-batch 0: forward", "micro-batch 0: backward", "gloo:all_reduce"},
    "megatron": {"forward-compute", "backward-compute"},
}


OF_ENGINE = {"torch": {"sample", "load weights"}, "sglang": set()}  # the inside of a server is not recorded
SERVER = ["--rollout-num-gpus", "1", "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]


@pytest.mark.parametrize(("backend", "engine"), [("fsdp", "torch"), ("megatron", "torch"), ("fsdp", "sglang")])
def test_a_trace_and_a_table_of_an_iteration(launch, backend, engine):
    flags = ["--train-backend", backend, "--rollout-engine", engine, *(SERVER if engine == "sglang" else [])]
    run = launch(f"profile_{backend}_{engine}", *flags, "--num-rollout", "3", "--profile", ranks=2)
    assert run.wait() == 0, run.err
    folder = run.output / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["iteration_1.json.gz", "iteration_1.txt"]
    events = json.loads(gzip.decompress((folder / "iteration_1.json.gz").read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["main loop", "trainer rank 0", "trainer rank 1", "rollout"]
    of = {name: {e["name"] for e in events if names[e["pid"]] == name and e["ph"] != "M"} for name in names.values()}
    assert {"generate", "train", "sync_weights"} <= of["main loop"]
    for rank in ("trainer rank 0", "trainer rank 1"):
        assert {"train", "policy step 0", "optimizer", "export weights", "aten::mm", "idle", *SPANS[backend]} <= of[
            rank
        ]
    assert {"generate a group", "convert and schedule", "idle", *OF_ENGINE[engine]} <= of["rollout"]

    (train,) = [e for e in events if names[e["pid"]] == "main loop" and e["name"] == "train"]
    (inside,) = [e for e in events if names[e["pid"]] == "trainer rank 0" and e["name"] == "train"]
    # One clock: the rank works within the loop's phase, up to the rounding of PyTorch's clock.
    assert train["ts"] - 1000 <= inside["ts"] <= inside["ts"] + inside["dur"] <= train["ts"] + train["dur"] + 1000
    assert "matrix products" in (folder / "iteration_1.txt").read_text()
