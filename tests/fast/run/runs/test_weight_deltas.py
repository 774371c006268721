"""Runs whose engines are sent what has changed: they are the runs whose engines are sent all weights."""

import pytest
from small_disk import fill, mounted_disk
from tolerance import SERVER_LOG_PROB_ERROR

DELTAS = ["--update-weight-transfer-mode", "disk-delta"]
SERVERS = ["--rollout-engine", "sglang", "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]


def learned(run):
    """Return the metrics of every step that depend on weights."""
    assert run.wait() == 0, run.err
    return [
        {name: value for name, value in row.items() if name.startswith(("train/", "rollout/"))}
        for row in run.rows().values()
    ]


def assert_deltas_are_sent(run):
    """Check the last update of each iteration: only the first of the run sends all weights."""
    rows = [row for row in run.rows().values() if "weight_sync/bytes" in row]
    assert len(rows) == 3
    assert all(row["weight_sync/whole"] == 0 and row["weight_sync/whole_updates"] == 1 for row in rows)
    assert all(0 < row["weight_sync/changed_fraction"] <= 1 and row["weight_sync/load_seconds"] > 0 for row in rows)
    names = sorted(folder.name for folder in (run.output / "weights").glob("delta_*"))
    assert names == ["delta_0000003", "delta_0000004"], "of the last two updates, and one per iteration after the first"


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [[], ["--train-backend", "megatron", "--tensor-model-parallel-size", "2"]], ids=["fsdp", "megatron"]
)
def test_the_torch_engine_generates_with_the_same_weights(launch, backend):
    flags = [*backend, "--num-rollout", "3", "--deterministic-mode"]
    name = "megatron" if backend else "fsdp"
    whole = learned(launch(f"{name}_whole", *flags, ranks=2))
    run = launch(f"{name}_deltas", *flags, *DELTAS, ranks=2)
    assert learned(run) == whole
    assert_deltas_are_sent(run)


@pytest.mark.slow
def test_servers_load_what_the_trainer_has(launch):
    """Every update is checked by tensor against the same weights from a file."""
    checked = [*DELTAS, "--check-weight-update-equal", "--num-rollout", "3"]
    run = launch("sglang_deltas", *SERVERS, "--rollout-num-gpus", "2", *checked)
    assert run.wait() == 0, run.err
    assert_deltas_are_sent(run)


@pytest.mark.slow
def test_a_rollout_worker_that_is_killed_gets_the_newest_weights(launch):
    run = launch("deltas_killed", *DELTAS, "--num-rollout", "3", "--use-fault-tolerance")
    run.wait_until(run.has_rows)
    assert run.kill_worker("RolloutActor")
    assert run.wait() == 0, run.err
    assert sorted(run.rows()) == list(range(1, 7))
    gaps = [row["train/train_rollout_logprob_abs_diff"] for step, row in run.rows().items() if step % 2]
    assert max(gaps) < SERVER_LOG_PROB_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--update-weight-disk-dir", "--update-weight-copy-dir"])
def test_a_full_disk_ends_the_run_with_one_sentence(launch, workplace, tmp_path, flag):
    """A restart makes no room, so there is none. The folder of the run's own host is refused before it starts."""
    saved = workplace / f"full{flag}_ckpt"
    more = ["--save", saved, "--save-interval", "1", "--max-restarts", "1", flag]
    with mounted_disk(tmp_path / "disk") as disk:
        fill(disk)
        run = launch(f"full{flag}", *DELTAS, *more, disk)
        assert run.wait() == 1, run.err
    last = run.err.splitlines()[-1]
    assert f"the disk tmpfs at {disk} (0 of 0.00105 GB free) is full; make room, or give another " in last
    assert flag in last and "Traceback" not in run.err and "restarting" not in run.err
    assert run.none_left()
