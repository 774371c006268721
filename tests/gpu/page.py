"""Write the page that ends ``run.sh``: ``page.py environment FILE.json``, then ``page.py page FOLDER``."""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.run_tests import results

PACKAGES = ("torch", "transformers", "ray", "megatron-core", "transformer-engine", "sglang", "triton", "numpy")
AIM = 0.45
WARM = 2  # iterations at the start of a run that its medians leave out
PARITY = re.compile(r"^(?:fsdp|megatron), .*distances.*$", re.MULTILINE)


def environment() -> dict[str, str]:
    import torch  # not at the top: the page is written without it

    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if not torch.cuda.is_available():
        return found | {"GPU": "none"}
    properties = torch.cuda.get_device_properties(0)
    found["GPU"] = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1024**3:.0f} GiB"
    found["CUDA of PyTorch"] = str(torch.version.cuda)
    found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["bf16 product of 8192 x 8192"] = f"{product_rate() / 1e12:.0f} TFLOP/s"
    return found


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
    """Return what a test recorded as a few words."""
    found: dict[str, Any] = json.loads(recorded) if recorded else {}
    return ", ".join(
        f"{name} {value:.1e}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


def gradients(folder: Path) -> Iterator[str]:
    log = folder / "gradients.log"
    found = PARITY.findall(log.read_text()) if log.exists() else []
    yield "\n## Gradients in bf16: distance from an fp32 oracle, relative to its norm (bound 0.05)\n"
    yield from (f"- {line}" for line in found or ["not measured"])


def steps(folder: Path) -> Iterator[str]:
    yield f"\n## A training step (aim: MFU of {AIM:.0%} or more)"
    rows = []
    for path in sorted(folder.glob("step-*.json")):
        one: dict[str, Any] = json.loads(path.read_text())
        rows.append(
            [
                path.stem.removeprefix("step-"),
                f"{one['micro_batches']} x {one['micro_tokens']}",
                f"{1000 * one['seconds']:.1f} ({1000 * one['spread'][0]:.1f} to {1000 * one['spread'][1]:.1f})",
                f"{one['tokens_per_second']:.0f}",
                f"{one['tflops']:.1f}",
                "peak unknown" if one["mfu"] is None else f"{one['mfu']:.1%}",
                f"{one['peak_memory_gib']:.1f}",
                "-" if one["idle_share"] is None else f"{one['idle_share']:.1%}",
                ", ".join(f"{k.removeprefix('time/')} {1000 * v:.0f}" for k, v in one["phases"].items()),
            ]
        )
    head = ["step", "tokens", "ms", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "no kernel runs", "ms by phase"]
    yield from table(head, rows)


def runs(folder: Path) -> Iterator[str]:
    yield f"\n## Runs through Ray: median seconds by phase, without the first {WARM} iterations"
    rows = []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        logged = [json.loads(line) for line in path.read_text().splitlines()]
        logged = [row for row in logged if "train/grad_norm" in row]
        warm = logged[WARM:] or logged
        names = sorted({name for row in warm for name in row if name.startswith("time/")})
        median = {n.removeprefix("time/"): statistics.median(row.get(n, 0.0) for row in warm) for n in names}
        step = median.pop("step", 0.0)
        outside = step - sum(median.get(name, 0.0) for name in ("generate", "train", "sync_weights", "eval"))
        trained = sum(median.get(name, 0.0) for name in ("log_probs", "forward_backward", "optimizer"))
        rows.append(
            [
                path.parent.name,
                str(len(logged)),
                f"{step:.2f}",
                ", ".join(f"{name} {seconds:.2f}" for name, seconds in median.items()),
                f"{median.get('train', 0.0) - trained:.2f}",
                f"{outside:.2f}",
                f"{max(abs(row.get('train/train_rollout_logprob_abs_diff', 0.0)) for row in logged):.1e}",
            ]
        )
    head = ["run", "steps", "step", "by phase", "train, outside the trainer", "outside phases", "engine - trainer"]
    yield from table(head, rows)
    yield "\nThe last column is the largest mean difference of a step's log-probs between engine and trainer."


def page(folder: Path) -> Iterator[str]:
    yield "# Figures of one GPU\n"
    given = folder / "environment.json"
    found: dict[str, str] = json.loads(given.read_text()) if given.exists() else {}
    yield from (f"- {name}: {value}" for name, value in found.items())
    for section in (parts, tests, gradients, steps, runs):
        yield from section(folder)


if __name__ == "__main__":
    if sys.argv[1] == "environment":
        Path(sys.argv[2]).write_text(json.dumps(environment()))
    else:
        print("\n".join(page(Path(sys.argv[2]))))
