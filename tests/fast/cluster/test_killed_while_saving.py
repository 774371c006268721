"""SIGKILL to every process of a run while it writes a checkpoint: the one before is whole, and the run goes on."""

import os

import pytest

SAME = ["--num-rollout", "3", "--lr", "1e-4", "--rollout-temperature", "0", "--disable-rewards-normalization"]
SAME += ["--save-interval", "1"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_checkpoint_before_is_whole(launch, workplace, backend):
    checkpoints, held = workplace / f"{backend}_checkpoints", workplace / f"{backend}.held"
    same = [*SAME, "--train-backend", backend]
    whole = launch(f"{backend}_whole", *same, "--save", str(workplace / f"{backend}_whole_checkpoints"), ranks=2)
    assert whole.wait() == 0, whole.err

    folder = checkpoints / ".writing_iter_0000002"
    killed = launch(
        backend, *same, "--save", str(checkpoints), ranks=2, HOLD_FSYNC=os.pathsep.join([str(folder), str(held)])
    )
    killed.wait_until(held.exists)
    killed.kill()
    assert killed.none_left()
    assert sorted(path.name for path in checkpoints.iterdir()) == [folder.name, "iter_0000001"]
    assert any(folder.iterdir()), "it was to be killed in the middle of writing"

    resumed = launch(backend, *same, "--save", str(checkpoints), "--load", str(checkpoints), ranks=2)
    assert resumed.wait() == 0, resumed.err
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"iter_000000{n}" for n in (1, 2, 3)]
    rows, expected = resumed.rows(), whole.rows()
    assert rows.keys() == expected.keys()
    for step in range(3, 7):
        for name in ("train/pg_loss", "train/grad_norm", "train/lr"):
            assert rows[step][name] == pytest.approx(expected[step][name], rel=1e-6, abs=1e-7), (step, name)
