"""Kill every process of a run while it writes a checkpoint: the previous one is complete and can be resumed."""

import os

import pytest

SAME = ["--num-rollout", "3", "--lr", "1e-4", "--rollout-temperature", "0", "--disable-rewards-normalization"]
SAME += ["--save-interval", "1"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".miles-lock")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_background", [False, True], ids=["waits", "in the background"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_previous_checkpoint_is_complete(launch, workplace, backend, in_background):
    name = f"{backend}_{in_background}"
    checkpoints, held = workplace / f"{name}_checkpoints", workplace / f"{name}.held"
    same = [*SAME, "--train-backend", backend, *["--async-save"] * in_background]
    folder = checkpoints / ".writing_iter_0000002"
    killed = launch(
        name, *same, "--save", str(checkpoints), ranks=2, HOLD_FSYNC=os.pathsep.join([str(folder), str(held)])
    )
    killed.wait_until(held.exists)
    killed.kill()
    assert killed.none_left()
    assert names_in(checkpoints) == [folder.name, "iter_0000001"]
    assert any(folder.iterdir()), "it was to be killed in the middle of writing"

    resumed = launch(name, *same, "--save", str(checkpoints), "--load", str(checkpoints), ranks=2)
    assert resumed.wait() == 0, resumed.err
    assert names_in(checkpoints) == [f"iter_000000{n}" for n in (1, 2, 3)]
    assert sorted(resumed.rows()) == [1, 2, 3, 4, 5, 6]
