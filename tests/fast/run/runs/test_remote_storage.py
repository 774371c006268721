"""A run that saves to a URL is killed, loses all files of its machine, and continues from there as if nothing was."""

import json
import shutil

import pytest

from miles.training.checkpoint_files import read_manifest
from tests.fast.run.runs.launches import trained

SAME = ["--num-rollout", "4", "--save-interval", "1", "--save-keep-last", "2", "--lr", "1e-3"]
CASES = {
    "fsdp": [],
    "fsdp in the background": ["--async-save"],
    "megatron": ["--train-backend", "megatron", "--tensor-model-parallel-size", "2", "--async-save"],
}


def complete(folder):
    return sorted(path.parent.name for path in folder.glob("iter_*/manifest.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_exactly_from_remote_storage_alone(launch, workplace, case):
    name = "remote_" + case.replace(" ", "_")

    def start(part, *more, **environment):
        bucket = workplace / f"{name}_{part.split('.')[0]}_bucket"
        flags = [*SAME, *CASES[case], "--save", f"file://{bucket}/run", "--save-hf", f"file://{bucket}/hf", *more]
        return launch(f"{name}_{part}", *flags, ranks=2, **environment), bucket / "run"

    whole, expected = start("whole")
    assert whole.wait() == 0, whole.err
    assert complete(expected) == ["iter_0000003", "iter_0000004"]
    assert not (expected / ".miles-lock").exists()
    assert json.loads((expected.parent / "hf/config.json").read_text())["model_type"]
    assert list((expected.parent / "hf").glob("*.safetensors"))

    held = workplace / f"{name}.held"
    killed, folder = start("run", HOLD_AT="3", HELD=str(held))
    killed.wait_until(lambda: held.exists() and "iter_0000003" in complete(folder))
    killed.kill()
    shutil.rmtree(killed.output)
    again, _ = start("run.again", "--load", f"file://{folder}")
    assert again.wait() == 0, again.err
    assert "downloading iter_0000003" in again.out
    assert complete(folder) == ["iter_0000003", "iter_0000004"]
    assert read_manifest(folder / "iter_0000004").keys() == read_manifest(expected / "iter_0000004").keys()
    for file, record in read_manifest(expected / "iter_0000004").items():
        if file.endswith(".distcp"):
            assert read_manifest(folder / "iter_0000004")[file] == record, file
    again_rows, whole_rows = again.rows(), whole.rows()
    assert again_rows.keys() == whole_rows.keys()
    for step, row in again_rows.items():
        assert trained(row) == trained(whole_rows[step]), step
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == sorted(whole.rows())
