"""Write the page that ends ``run.sh``: ``page.py environment FILE.json``, then ``page.py page FOLDER``."""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.devices import Figures, figures_of
from tests.gpu.run_tests import results

PACKAGES = ("torch", "transformers", "ray", "megatron-core", "transformer-engine", "sglang", "triton", "numpy")
AIM = 0.45
LAUNCHER_AIM = 0.03
WARM = 2  # iterations at the start of a run that its medians leave out


def environment() -> dict[str, str]:
    import torch  # not at the top: the page is written without it

    facts = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    if not torch.cuda.is_available():
        return facts | {"GPU": "none"}
    properties = torch.cuda.get_device_properties(0)
    facts["GPU"] = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1024**3:.0f} GiB"
    facts["CUDA of PyTorch"] = str(torch.version.cuda)
    facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    facts["bf16 product of 8192 x 8192"] = f"{product_rate() / 1e12:.0f} TFLOP/s"
    for kind, pinned in (("page-locked", True), ("ordinary", False)):
        facts[f"copy from {kind} host memory"] = f"{copy_rate(pinned) / 1e9:.1f} GB/s"
    return facts


def product_rate(size: int = 8192, repeats: int = 20) -> float:
    """Return the operations per second of a matrix product on random numbers: a ceiling in practice."""
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        a @ b
    last.record()
    last.synchronize()
    return 2.0 * size**3 * repeats / (first.elapsed_time(last) / 1000)


def copy_rate(pinned: bool, size: int = 1 << 30, repeats: int = 5) -> float:
    """Return the bytes per second from the host's memory to the GPU: a ceiling of weight updates on one GPU."""
    import torch

    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device="cuda")
    source = source.pin_memory() if pinned else source
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return size * repeats / (time.perf_counter() - started)


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}")
    yield from ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def parts(folder: Path) -> Iterator[str]:
    rows = [line.split("\t") for line in (folder / "parts.tsv").read_text().splitlines()]
    yield "\n## Parts"
    yield from table(["part", "result", "seconds", "reason"], rows)


def tests(folder: Path) -> Iterator[str]:
    yield "\n## Tests"
    rows = [
        [path.stem, one.name, one.result, f"{one.seconds:.0f}", one.reason or figures(one.figures)]
        for path in sorted(folder.glob("*.xml"))
        for one in results(path)
    ]
    yield from table(["part", "test", "result", "seconds", "reason, or figures"], rows) if rows else ["\nnone ran"]


def figures(recorded: str) -> str:
    """Return the figures that a test recorded, as a few words."""
    values: dict[str, Any] = json.loads(recorded) if recorded else {}
    return ", ".join(
        f"{name} {value:.1e}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def gradients(folder: Path) -> Iterator[str]:
    yield "\n## Gradients in bf16: distance from an fp32 oracle, relative to its norm (bound 0.05)\n"
    path = folder / "gradients.xml"
    rows = [one for one in results(path) if one.figures] if path.exists() else []
    yield from (f"- {one.name}: {figures(one.figures)}, {one.result}" for one in rows)
    if not rows:
        yield "- not measured"


def measured(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the result of a part; None if it has not run to its end."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None


def steps(folder: Path) -> Iterator[str]:
    yield f"\n## A training step (aim: MFU of {AIM:.0%} or more)"
    rows = []
    for path in sorted(folder.glob("step-*.json")):
        one = measured(folder, path.stem)
        if one is None:
            continue
        rows.append(
            [
                path.stem.removeprefix("step-"),
                f"{one['micro_batches']} x {one['micro_tokens']}",
                f"{1000 * one['seconds']:.1f} ({1000 * one['spread'][0]:.1f} to {1000 * one['spread'][1]:.1f})",
                f"{one['tokens_per_second']:.0f}",
                f"{one['tflops']:.1f}",
                "peak unknown" if one["mfu"] is None else f"{one['mfu']:.1%}{met(one['mfu'] >= AIM)}",
                f"{one['peak_memory_gib']:.1f}",
                against(one["peak_memory_gib"], one["foreseen_gib"]),
                "-" if one["idle_share"] is None else f"{one['idle_share']:.1%}",
                ", ".join(f"{k.removeprefix('time/')} {1000 * v:.0f}" for k, v in one["phases"].items()),
            ]
        )
    head = [
        "step",
        "tokens",
        "ms",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "peak GiB",
        "foreseen",
        "no kernel runs",
        "ms by phase",
    ]
    yield from table(head, rows)


def met(is_met: bool) -> str:
    return ", met" if is_met else ", MISSED"


def against(measured: float, foreseen: float | None) -> str:
    """Return what ``--rehearse`` foresees, in GiB, and the share of it that was measured, if anything was."""
    if foreseen is None:
        return "not foreseen"
    return f"{foreseen:.1f}" + (f" ({measured / foreseen:.0%} of it measured)" if measured else "")


def logits(folder: Path) -> Iterator[str]:
    yield "\n## Logits in fp32 (aim: never whole in memory)\n"
    chunked, whole = measured(folder, "step-fsdp"), measured(folder, "step-fsdp-whole-logits")
    if chunked is None:
        yield "- not measured: no result of step-fsdp"
        return
    is_met = chunked["largest_gib"] < chunked["logits_gib"]
    yield (
        f"- largest tensor of a step: {chunked['largest_gib']:.3f} GiB; the whole logits of a micro-batch in fp32: "
        f"{chunked['logits_gib']:.3f} GiB{met(is_met)}"
    )
    if whole is not None:
        saved = whole["peak_memory_gib"] - chunked["peak_memory_gib"]
        yield (
            f"- `--log-probs-chunk-size -1`: largest tensor {whole['largest_gib']:.3f} GiB, peak {saved:+.1f} GiB, "
            f"time x {whole['seconds'] / chunked['seconds']:.2f}"
        )


# Name, the part whose rate is divided, the part that it is divided by.
RATIOS = (
    ("packed against padded rows, samples of unequal length", "step-fsdp-unequal", "step-fsdp-padded"),
    ("Megatron with its fused SwiGLU against without", "step-megatron-fused", "step-megatron"),
    ("FSDP against Megatron", "step-fsdp", "step-megatron"),
    ("micro-batches of double size", "step-fsdp-double", "step-fsdp"),
)


def ratios(folder: Path) -> Iterator[str]:
    yield "\n## Ratios of tokens per second"
    rows = []
    for title, part, base in RATIOS:
        one, other = measured(folder, part), measured(folder, base)
        if one is None or other is None:
            lacking = " and ".join(n for n, report in ((part, one), (base, other)) if report is None)
            rows.append([title, f"not measured: no result of {lacking}"])
        else:
            rows.append([title, f"{one['tokens_per_second'] / other['tokens_per_second']:.2f}"])
    report = measured(folder, "server-speed") or {}
    fast, slow = report.get("tokens_per_second", {}), report.get("without_graphs", {})
    title = "engine with CUDA graphs against without, responses at once: ratio"
    texts = [f"{n}: {fast[n] / slow[n]:.2f} ({fast[n]:.0f} tokens/s)" for n in fast if n in slow]
    rows.append([title, ", ".join(texts) or "not measured: no result of server-speed"])
    yield from table(["what", "ratio"], rows)


def link_of(over: str, gpu: Figures | None) -> tuple[str, float | None]:
    """Return the narrowest link that weights cross, and its GB/s; None for a device that the table does not have."""
    if over == "NCCL" and (gpu is None or gpu.nvlink):
        return "NVLink", gpu and gpu.nvlink
    return "PCIe", gpu and gpu.pcie


def sync_row(what: str, mode: str, over: str, size: float, seconds: float, gpu: Figures | None) -> list[str]:
    link, bandwidth = link_of(over, gpu)
    rate = size / seconds / 1e9
    share = ["unknown", "-"] if bandwidth is None else [f"{bandwidth:.0f}", f"{rate / bandwidth:.1%}"]
    return [what, mode, over, f"{size / 1e6:.1f}", f"{seconds:.3f}", f"{rate:.2f}", link, *share]


def weights(folder: Path) -> Iterator[str]:
    """Return the share of their link that weight updates reach: one server's by each way, and the updates of runs."""
    yield "\n## Weight updates: share of the link's bandwidth by the data sheet"
    gpu = figures_of((measured(folder, "environment") or {}).get("GPU", "").replace(",", " "))
    report = measured(folder, "server-speed") or {}
    rows = [
        sync_row("server", one["mode"], one["over"], one["bytes"], one["seconds"], gpu)
        for one in report.get("updates", [])
    ]
    for path in sorted(folder.glob("*/metrics.jsonl")):
        logged = [row for row in rows_of(path) if row.get("weight_sync/load_seconds")]
        if logged:
            size = statistics.median(row["weight_sync/bytes"] for row in logged)
            seconds = statistics.median(row["weight_sync/load_seconds"] for row in logged)
            rows.append(sync_row(path.parent.name, "the run's", "the host", size, seconds, gpu))
    head = ["engine of", "mode", "over", "MB", "seconds", "GB/s", "narrowest link", "its GB/s", "share"]
    yield from table(head, rows) if rows else ["\nnot measured"]
    if "no NCCL" in report:
        yield f"\nOver NCCL: not measured, {report['no NCCL']}."


def memory(folder: Path) -> Iterator[str]:
    yield "\n## Memory that a colocated server releases\n"
    report = (measured(folder, "server-speed") or {}).get("memory", {"not measured": "no result of server-speed"})
    if "not measured" in report:
        yield f"- not measured: {report['not measured']}"
        return
    freed = report["serving"] - report["released"]
    yield (
        f"- {freed / 1024**3:.1f} GiB of {report['serving'] / 1024**3:.1f} that all processes hold while it serves; "
        f"{report['taken back'] / 1024**3:.1f} after it has taken them back"
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs(folder: Path) -> Iterator[str]:
    yield f"\n## Runs through Ray: median seconds by phase, without the first {WARM} iterations"
    rows = [run_row(path) for path in sorted(folder.glob("*/metrics.jsonl"))]
    launcher = f"launcher (aim: < {LAUNCHER_AIM:.0%})"
    head = ["run", "steps", "step", "by phase", launcher, "peak GiB", "foreseen", "engine - trainer"]
    yield from table(head, rows)
    yield (
        "\nThe launcher's share of a step: seconds outside the phases, and of the phase `train` outside the trainer's "
        "own. The last column is the largest mean difference of a step's log-probs between engine and trainer."
    )
    quickstart = folder / "run-quickstart.log"
    said = re.findall(r"^quickstart: held-out .*$", quickstart.read_text(), re.M) if quickstart.exists() else []
    yield from (f"\n{line}" for line in said)


def launcher_share(row: dict[str, Any]) -> float:
    """Return the share of an iteration outside its phases, and of the phase ``train`` outside the trainer."""
    work = sum(row.get(f"time/{name}", 0.0) for name in ("generate", "sync_weights", "eval"))
    work += sum(row.get(f"time/{name}", 0.0) for name in ("log_probs", "forward_backward", "optimizer"))
    return 1.0 - work / row["time/step"]


def iterations(logged: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the row of each iteration's last step, with the seconds of all of its steps."""
    seconds: Counter[str] = Counter()
    for row in logged:
        seconds.update({name: value for name, value in row.items() if name.startswith("time/")})
        if "time/step" in row:
            yield row | seconds
            seconds.clear()


def run_row(path: Path) -> list[str]:
    logged = [row for row in rows_of(path) if "train/grad_norm" in row]
    timed = list(iterations(logged))
    if not timed:
        return [path.parent.name, str(len(logged)), *["-"] * 6]
    warm = timed[WARM:] or timed
    names = sorted({name for row in warm for name in row if name.startswith("time/")})
    median = {n.removeprefix("time/"): statistics.median(row.get(n, 0.0) for row in warm) for n in names}
    step = median.pop("step")
    share = statistics.median(map(launcher_share, warm))
    peak = max((row.get("perf/trainer_memory_gib", 0.0) for row in logged), default=0.0)
    foreseen = [row["perf/trainer_memory_foreseen_gib"] for row in logged if "perf/trainer_memory_foreseen_gib" in row]
    return [
        path.parent.name,
        str(len(logged)),
        f"{step:.2f}",
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in median.items()),
        f"{share:.1%}{met(share < LAUNCHER_AIM)}",
        f"{peak:.1f}",
        against(peak, foreseen[-1] if foreseen else None),
        f"{max(abs(row.get('train/train_rollout_logprob_abs_diff', 0.0)) for row in logged):.1e}",
    ]


def page(folder: Path) -> Iterator[str]:
    yield "# Figures of one GPU\n"
    report = measured(folder, "environment") or {}
    yield from (f"- {name}: {value}" for name, value in report.items())
    for section in (parts, tests, gradients, steps, logits, ratios, weights, memory, runs):
        yield from section(folder)


if __name__ == "__main__":
    if sys.argv[1] == "environment":
        Path(sys.argv[2]).write_text(json.dumps(environment()))
    else:
        print("\n".join(page(Path(sys.argv[2]))))
