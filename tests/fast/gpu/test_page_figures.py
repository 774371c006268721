"""The tables of the page of tests/gpu/run.sh, from figures that are made up here."""

import json

import pytest

from tests.gpu import page
from tests.gpu.devices import figures_of

STEP = {
    "micro_batches": 4,
    "micro_tokens": 8192,
    "seconds": 0.5,
    "spread": [0.4, 0.6],
    "tokens_per_second": 60_000.0,
    "tflops": 450.0,
    "mfu": 0.455,
    "peak_memory_gib": 21.0,
    "foreseen_gib": 28.0,
    "largest_gib": 0.6,
    "logits_gib": 4.6,
    "idle_share": 0.05,
    "phases": {"time/forward_backward": 0.4, "time/optimizer": 0.1},
}
SERVER = {
    "updates": [
        {"mode": "ipc", "over": "the host", "bytes": 1_260_000_000, "seconds": 0.2, "first": 1.0},
        {"mode": "broadcast", "over": "NCCL", "bytes": 1_260_000_000, "seconds": 0.014, "first": 1.0},
    ],
    "tokens_per_second": {"1": 300.0, "64": 9000.0},
    "without_graphs": {"1": 100.0, "64": 6000.0},
    "memory": {"serving": 60 * 1024**3, "released": 4 * 1024**3, "taken back": 59 * 1024**3},
}


def write(folder, name, found):
    (folder / f"{name}.json").write_text(json.dumps(found))


def cells(lines, first):
    """Return the cells of the row that begins with ``first``."""
    (row,) = [line for line in lines if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_steps_are_beside_the_aim_and_what_was_foreseen(tmp_path):
    write(tmp_path, "step-fsdp", STEP)
    write(tmp_path, "step-4b", STEP | {"mfu": 0.3, "foreseen_gib": None, "idle_share": None})
    write(tmp_path, "step-cpu", STEP | {"mfu": None, "peak_memory_gib": 0.0})
    lines = list(page.steps(tmp_path))
    assert "aim: MFU of 45% or more" in lines[0]
    assert cells(lines, "fsdp") == [
        "fsdp",
        "4 x 8192",
        "500.0 (400.0 to 600.0)",
        "60000",
        "450.0",
        "45.5%, met",
        "21.0",
        "28.0 (75% of it measured)",
        "5.0%",
        "forward_backward 400, optimizer 100",
    ]
    assert cells(lines, "4b")[5:9] == ["30.0%, MISSED", "21.0", "not foreseen", "-"]
    assert cells(lines, "cpu")[5:8] == ["peak unknown", "0.0", "28.0"]


def test_logits_that_are_whole_miss_the_aim(tmp_path):
    assert "no result of step-fsdp" in "\n".join(page.logits(tmp_path))
    write(tmp_path, "step-fsdp", STEP)
    write(tmp_path, "step-fsdp-whole-logits", STEP | {"largest_gib": 4.6, "peak_memory_gib": 28.5, "seconds": 0.45})
    said = "\n".join(page.logits(tmp_path))
    assert "largest tensor of a step: 0.600 GiB; the whole logits of a micro-batch in fp32: 4.600 GiB, met" in said
    assert "largest tensor 4.600 GiB, peak +7.5 GiB, time x 0.90" in said
    write(tmp_path, "step-fsdp", STEP | {"largest_gib": 4.6})
    assert "4.600 GiB, MISSED" in "\n".join(page.logits(tmp_path))


def test_ratios_name_the_part_that_lacks(tmp_path):
    write(tmp_path, "step-fsdp-unequal", STEP)
    write(tmp_path, "step-fsdp-padded", STEP | {"tokens_per_second": 40_000.0})
    write(tmp_path, "step-megatron", STEP)
    (tmp_path / "step-fsdp.json").touch()
    lines = list(page.ratios(tmp_path))
    assert cells(lines, "packed against padded rows, samples of unequal length")[1] == "1.50"
    fused = cells(lines, "Megatron with its fused SwiGLU against without")[1]
    assert fused == "not measured: no result of step-megatron-fused"
    assert cells(lines, "FSDP against Megatron")[1] == "not measured: no result of step-fsdp"
    graphs = "engine with CUDA graphs against without, responses at once: ratio"
    assert cells(lines, graphs)[1] == "not measured: no result of server-speed"
    write(tmp_path, "server-speed", SERVER)
    assert cells(list(page.ratios(tmp_path)), graphs)[1] == "1: 3.00 (300 tokens/s), 64: 1.50 (9000 tokens/s)"


@pytest.mark.parametrize(
    ("gpu", "of_host", "of_nccl"),
    [
        ("1 x NVIDIA H200, 140 GiB", ["PCIe", "63", "10.0%"], ["NVLink", "450", "20.0%"]),
        ("1 x NVIDIA A100-SXM4-80GB, 80 GiB", ["PCIe", "32", "20.0%"], ["NVLink", "300", "30.0%"]),
        ("1 x NVIDIA L4, 22 GiB", ["PCIe", "32", "20.0%"], ["PCIe", "32", "285.7%"]),
        ("none", ["PCIe", "unknown", "-"], ["NVLink", "unknown", "-"]),
    ],
)
def test_weight_updates_are_shares_of_their_link(tmp_path, gpu, of_host, of_nccl):
    write(tmp_path, "environment", {"GPU": gpu})
    write(tmp_path, "server-speed", SERVER)
    over_host, over_nccl = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in list(page.weights(tmp_path))[-2:]
    )
    assert over_host == ["server", "ipc", "the host", "1260.0", "0.200", "6.30", *of_host]
    assert over_nccl == ["server", "broadcast", "NCCL", "1260.0", "0.014", "90.00", *of_nccl]


def test_weight_updates_of_runs_and_the_reason_for_none_over_nccl(tmp_path):
    assert list(page.weights(tmp_path))[-1] == "\nnot measured"
    rows = [{"step": n, "weight_sync/bytes": 2e9, "weight_sync/load_seconds": s} for n, s in enumerate((9.0, 1.0, 1.0))]
    log(tmp_path / "run-fsdp", rows)
    write(tmp_path, "server-speed", {"updates": [], "no NCCL": "needs 2 GPUs; this machine has 1"})
    lines = list(page.weights(tmp_path))
    assert cells(lines, "run-fsdp")[3:6] == ["2000.0", "1.000", "2.00"]
    assert lines[-1] == "\nOver NCCL: not measured, needs 2 GPUs; this machine has 1."


def log(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_the_memory_that_a_server_releases(tmp_path):
    assert list(page.memory(tmp_path))[1] == "- not measured: no result of server-speed"
    write(tmp_path, "server-speed", SERVER)
    assert list(page.memory(tmp_path))[1].startswith("- 56.0 GiB of 60.0 that")
    write(tmp_path, "server-speed", SERVER | {"memory": {"not measured": "torch_memory_saver is not installed"}})
    assert list(page.memory(tmp_path))[1] == "- not measured: torch_memory_saver is not installed"


ROW = {
    "train/grad_norm": 1.0,
    "time/step": 10.0,
    "time/generate": 6.0,
    "time/train": 3.0,
    "time/forward_backward": 2.5,
    "time/optimizer": 0.4,
    "time/sync_weights": 0.9,
    "perf/trainer_memory_gib": 15.0,
    "train/train_rollout_logprob_abs_diff": 0.01,
}


def test_runs_show_the_launchers_share_and_memory_against_what_was_foreseen(tmp_path):
    slow = ROW | {"time/step": 99.0, "train/train_rollout_logprob_abs_diff": -0.02}
    foreseen = {"perf/trainer_memory_foreseen_gib": 20.0, "perf/trainer_memory_gib": 16.0}
    log(tmp_path / "run-fsdp", [slow, slow, ROW, ROW | foreseen, {"step": 9, "eval/held/accuracy": 0.5}])
    log(tmp_path / "run-megatron", [ROW | {"time/step": 10.2}])
    log(tmp_path / "run-empty", [{"step": 0}])
    (tmp_path / "run-quickstart.log").write_text("…\nquickstart: held-out accuracy 0.1 -> 0.9 in 60 s\n")
    lines = list(page.runs(tmp_path))
    assert "| launcher (aim: < 3%) |" in lines[2]
    fsdp = cells(lines, "run-fsdp")
    assert fsdp[1:3] == ["4", "10.00"] and fsdp[4:] == [
        "2.0%, met",
        "16.0",
        "20.0 (80% of it measured)",
        "2.0e-02",
    ]
    assert cells(lines, "run-megatron")[4:7] == ["3.9%, MISSED", "15.0", "not foreseen"]
    assert cells(lines, "run-empty")[1:] == ["0", *["-"] * 6]
    assert lines[-1] == "\nquickstart: held-out accuracy 0.1 -> 0.9 in 60 s"


def test_gradients_are_those_that_the_tests_recorded(tmp_path):
    assert list(page.gradients(tmp_path))[-1] == "- not measured"
    recorded = "<properties><property name='figures' value='{&quot;padded&quot;: 0.016}'/></properties>"
    failed = f"<testcase name='test_b[fsdp]'>{recorded}<failure message='assert'/></testcase>"
    cases = f"<testcase name='test_a[fsdp]'>{recorded}</testcase>{failed}<testcase name='test_c'><skipped/></testcase>"
    (tmp_path / "gradients.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    said = ["- test_a[fsdp]: padded 1.6e-02, ok", "- test_b[fsdp]: padded 1.6e-02, FAILED"]
    assert list(page.gradients(tmp_path))[1:] == said


def test_figures_are_those_of_the_gpu_that_cuda_names():
    assert figures_of("NVIDIA H100 80GB HBM3").pcie == 63.0
    assert figures_of("NVIDIA A100-SXM4-80GB").nvlink == 300
    assert figures_of("NVIDIA L40S").bf16 == 362e12 and figures_of("NVIDIA L4").bf16 == 121e12
    assert figures_of("CPU") is None


def test_the_steps_of_an_iteration_are_added_up(tmp_path):
    first = {"train/grad_norm": 1.0, "time/forward_backward": 1.0, "time/optimizer": 0.1}
    last = ROW | {"time/forward_backward": 1.5, "time/optimizer": 0.3}
    log(tmp_path / "run-fsdp", [first, last, first, last])
    fsdp = cells(list(page.runs(tmp_path)), "run-fsdp")
    assert fsdp[1] == "4" and "forward_backward 2.50" in fsdp[3] and fsdp[4] == "2.0%, met"
