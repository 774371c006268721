"""Measure a training step against fixed work, and compare the ratio with the last record of this processor.

    python benchmarks/step_history.py                          exit status 1 if a part is more than 10 % slower
    python benchmarks/step_history.py --record "what changed"  add a row to benchmarks/history.md

The step is the quickstart's step on a random model of the shape of SmolLM2-135M: 8 prompts x 8 samples, bf16, or fp32
where bf16 would be emulated. The fixed work is a matrix product, a copy and a softmax. Both take turns in one process
on one thread, and are measured in processor time, so that neither a faster machine nor a neighbor changes the ratio
much. Rows are compared with the last one of the same processor and dtype. On another machine make a record first.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

HISTORY = Path(__file__).with_name("history.md")
ALLOWED = 1.10  # slower than the last record by more is reported
COLUMNS = ("date", "commit", "torch", "processor", "dtype", "forward and backward", "log-probs", "optimizer", "change")
PARTS = COLUMNS[5:8]
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Record:
    """A row of the history. The parts are processor seconds, divided by the processor seconds of the fixed work."""

    date: str
    commit: str
    torch: str
    processor: str
    dtype: str
    ratios: tuple[float, ...]
    change: str

    def row(self) -> str:
        """Return the row as a line of the table."""
        cells = [self.date, self.commit, self.torch, self.processor, self.dtype]
        return "| " + " | ".join([*cells, *(f"{ratio:.2f}" for ratio in self.ratios), self.change]) + " |"

    @classmethod
    def of_row(cls, line: str) -> Record:
        """Read a line of the table. Raises ``ValueError`` if it has other columns."""
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{HISTORY.name}: a row has {len(cells)} columns, not {len(COLUMNS)}: {line}")
        return cls(*cells[:5], tuple(float(cell) for cell in cells[5:8]), cells[8])


def records_in(text: str) -> list[Record]:
    """Return the rows of a history, oldest first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [Record.of_row(line) for line in lines[2:]]


def last_of_kind(records: list[Record], record: Record) -> Record | None:
    """Return the last record of the same processor and dtype."""
    alike = [r for r in records if (r.processor, r.dtype) == (record.processor, record.dtype)]
    return alike[-1] if alike else None


def slower_parts(last: Record, record: Record) -> list[str]:
    """Return a line for each part that is slower than allowed."""
    pairs = zip(PARTS, last.ratios, record.ratios, strict=True)
    return [
        f"{part}: {now:.2f} of the fixed work, {now / before:.2f} times the {before:.2f} of {last.date} ({last.commit})"
        for part, before, now in pairs
        if now > ALLOWED * before
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="CHANGE", help="add a row that states what changed")
    parser.add_argument("--turns", type=int, default=5, help="steps; the one before them is warm-up")
    return parser.parse_args()


def measure(turns: int) -> tuple[str, tuple[float, ...]]:
    """Return the dtype and the ratio of each part: the medians over the turns."""
    import torch
    import torch.distributed as dist
    from backends import random_batch, settings_of  # benchmarks/backends.py
    from transformers import LlamaConfig, LlamaForCausalLM

    from miles.base.host import has_bf16
    from miles.batch.schedule import schedule_step
    from miles.training.backend import build_backend
    from miles.training.scoring import log_probs
    from miles.training.trainer import Trainer

    torch.set_num_threads(1)
    fp32 = not has_bf16()
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
        options = argparse.Namespace(
            model=folder, ranks=1, fsdp="", prompts=8, samples=8, prompt_tokens=48, new_tokens=12, fp32=fp32
        )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        settings = settings_of("fsdp", options)
        backend = build_backend(settings, torch.device("cpu"), total_steps=1000)
    trainer = Trainer(backend, settings.loss, 1)
    batch = random_batch(settings, options, SHAPE["vocab_size"])
    (shard,) = schedule_step(batch, 1, settings.training, settings.parallel)
    before_the_step = log_probs(backend, backend.policy, shard)  # the reference's too, which has the same weights
    shard = replace(shard, batch=replace(shard.batch, ref_log_probs=before_the_step))
    fixed = torch.randn(1024, 1024)

    def fixed_work() -> None:
        for _ in range(8):
            product = fixed @ fixed
            product.softmax(-1).clone()

    def accumulate() -> None:
        trainer.policy.model.forward_backward(shard, trainer.policy.loss_function)

    work = {
        "log-probs": lambda: log_probs(backend, backend.policy, shard),
        "forward and backward": accumulate,
        "optimizer": lambda: trainer.policy.optimizer.step(),
    }
    ratios: dict[str, list[float]] = {part: [] for part in PARTS}
    for turn in range(turns + 1):
        before = _processor_seconds(fixed_work)
        seconds = {part: _processor_seconds(call) for part, call in work.items()}
        unit = (before + _processor_seconds(fixed_work)) / 2
        for part in PARTS:
            ratios[part] += [seconds[part] / unit] if turn else []
    dist.destroy_process_group()
    return "fp32" if fp32 else "bf16", tuple(statistics.median(ratios[part]) for part in PARTS)


def _processor_seconds(call: object) -> float:
    assert callable(call)
    started = time.process_time()
    call()
    return time.process_time() - started


def commit_of() -> str:
    """Return the commit of the checkout, or "unknown"."""
    asked = ["git", "-C", str(HISTORY.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def processor_name() -> str:
    """Return the model of the processor, with its family and model, as virtual machines hide the name."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    name = facts.get("model name", "unknown").replace("|", "/")
    return f"{name}, family {facts.get('cpu family')}, model {facts.get('model')}"


def main() -> int:
    options = parse()
    sys.path.insert(0, str(Path(__file__).parent))
    from miles.run.cpu_tuning import malloc_environment

    missing = malloc_environment("cpu", os.environ)  # as in trainer processes; glibc reads it when a process starts
    if missing:
        os.environ.update(missing)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch

    dtype, ratios = measure(options.turns)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    record = Record(today, commit_of(), torch.__version__, processor_name(), dtype, ratios, options.record or "")
    print(record.row())
    if options.record:
        with HISTORY.open("a", encoding="utf-8") as file:
            file.write(record.row() + "\n")
        return 0
    last = last_of_kind(records_in(HISTORY.read_text(encoding="utf-8")), record)
    if last is None:
        print(f"no record of this processor in {HISTORY.name}: make one with --record")
        return 0
    slower = slower_parts(last, record)
    print("\n".join(slower) if slower else f"no part is more than {ALLOWED - 1:.0%} slower than on {last.date}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
