"""A run with images on a real server; then it is replayed and sampled from."""

import json

import pytest
from tolerance import RUN_ERROR, SERVER_LOG_PROB_ERROR
from vision_models import image_flags, png

from miles.commands.sample import main as sample
from miles.config.vllm.environment import missing_vllm, vllm_python
from miles.engine.servers.launch import ServerOnHost
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.launch import SglangProgram
from tests.fast.engine.sglang_servers import HOST, KEYS
from tests.fast.engine.sglang_servers import SMALL as SMALL_SERVER
from tests.fast.run.runs.launches import trained
from tests.fast.run.runs.test_sglang_run import SERVERS, external

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NEEDS_VLLM = pytest.mark.skipif(missing_vllm(vllm_python()) is not None, reason="vLLM is missing: bash scripts/vllm.sh")


@pytest.mark.parametrize(
    ("name", "servers", "shape"),
    [
        ("images", SERVERS, {"side": 56, "patch": 14}),
        pytest.param("images_vllm", ["--rollout-engine", "vllm"], {"hidden": 32}, marks=NEEDS_VLLM),
    ],
)
def test_a_run_with_images_and_what_comes_after_it(launch, tmp_path, capsys, name, servers, shape):
    flags = [*image_flags(tmp_path, **shape), "--num-rollout", "2"]
    saved = str(tmp_path / "rollout_{rollout_id}.jsonl")
    held = ["--eval-prompt-data", "held", str(tmp_path / "rows.jsonl"), "--eval-interval", "1"]
    save_flags = ["--save", str(tmp_path / "checkpoints"), "--save-debug-rollout-data", saved]
    run = launch(name, *flags, *servers, *held, *save_flags, "--check-weight-update-equal")
    assert run.wait() == 0, run.err
    rows = run.rows()
    steps = [row for row in rows.values() if "train/grad_norm" in row]
    assert steps and all(row["train/grad_norm"] > 0 for row in steps)
    errors = [row["train/train_rollout_logprob_abs_diff"] for row in steps]
    assert min(errors) < SERVER_LOG_PROB_ERROR  # of the first step of each iteration; a later one has new weights
    assert any(name.startswith("eval/held/") for row in rows.values() for name in row)

    answers = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"].count("<|image_pad|>") == len(row["images"]) for row in answers)
    assert (run.output / "report.html").read_text().count("data:image/jpeg;base64,") >= 1

    replayed = launch(f"{name}_replayed", *flags, "--load-debug-rollout-data", saved)
    assert replayed.wait() == 0, replayed.err
    for step, row in replayed.rows().items():
        wanted = trained(rows[step])
        names = [name for name in trained(row) if name.startswith("train/")]
        assert {n: row[n] for n in names} == pytest.approx({n: wanted[n] for n in names}, rel=RUN_ERROR), step

    (tmp_path / "a.png").write_bytes(png(3))
    assert sample([str(run.output), "what?", "--image", str(tmp_path / "a.png"), "--engine", "torch", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4


class CachingServer(SglangProgram):
    """A server with SGLang's cache of encoded images, which servers of runs do not have."""

    def environment(self, base, folder):
        return super().environment(base, folder) | {"SGLANG_VLM_CACHE_SIZE_MB": "100"}


def test_a_running_server_may_reuse_images_if_the_tower_is_frozen(launch, tmp_path):
    """The last two iterations draw images of the first ones again."""
    flags = [*image_flags(tmp_path, side=56, patch=14), "--freeze-vision-tower", "--lr", "1e-2", "--num-rollout", "5"]
    spec = CachingServer(
        str(tmp_path / "model"), "float32", "cpu", 1, 0, flags=SMALL_SERVER, keys=KEYS, reads_images=True
    )
    server = ServerOnHost(spec, LogFile(tmp_path / "server.log"), HOST)
    try:
        address = server.start().removeprefix("http://")
        run = launch("images_external", *flags, *external(address), "--check-weight-update-equal")
        assert run.wait() == 0, run.err
    finally:
        server.stop()
    steps = [row for row in run.rows().values() if "train/grad_norm" in row]
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert all(row["train/train_rollout_logprob_abs_diff"] < SERVER_LOG_PROB_ERROR for row in steps[::2])
