"""What ``--async-steps K`` gives on a cluster, simulated with the phase times that a synchronous run has measured.

``python benchmarks/async_overlap.py RUN/metrics.jsonl [--generate-scale 4] [--rollouts 1000]``

Generation and training have devices of their own, as on a cluster. Each simulated rollout draws the phase times of a
random measured one (generate, train and sync together, as they came), and obeys the rules of rollout/ordering.py:
rollout r is generated after rollout r - 1 and by weights of version r - K; step r needs rollout r and the step before;
weights arrive between two rollouts. ``--generate-scale`` stretches generation, for the answer lengths of other tasks.
One JSON object a K: seconds a step, the share of time that trainer and engine work, and the gain over K = 0.

``--fully-async`` has the same bound and the same figures here, and more in truth: it also fills the tail of a rollout,
where few responses are still running, which phase times do not show. The two-core case is measured, not simulated:
``benchmarks/async_on_cpu.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Phases:
    """Seconds of one rollout's phases."""

    generate: float
    train: float
    sync: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run with --async-steps 0")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--generate-scale", type=float, default=1.0)
    parser.add_argument("--max-steps", type=int, default=2, help="K = 0 .. this")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def measured(path: Path, generate_scale: float) -> list[Phases]:
    """The phase times of every rollout in ``path`` but the first, which warms up."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    phases = [
        Phases(generate_scale * row["time/generate"], row["time/train"], row["time/sync_weights"])
        for row in rows
        if "time/generate" in row and "time/train" in row
    ]
    if len(phases) < 2:
        raise ValueError(f"{path}: {len(phases)} rollouts with phase times; give the metrics.jsonl of a longer run")
    return phases[1:]


def simulate(phases: list[Phases], k: int) -> dict[str, float]:
    """Seconds a step and the share of the time that each side works, with ``--async-steps k``.

    Conservative: a hand-over of weights occupies trainer and engine both for the whole of its measured time.
    """
    generated: list[float] = []  # when rollout r is whole
    free: list[float] = []  # when the trainer has done step r and handed its weights over
    for r, phase in enumerate(phases):
        begin = generated[r - 1] if r else 0.0
        if r > k:  # version r - k exists when step r - k - 1 is done, and is loaded between two rollouts
            begin = max(begin, free[r - k - 1] - phases[r - k - 1].sync) + phases[r - k - 1].sync
        generated.append(begin + phase.generate)
        free.append(max(generated[r], free[r - 1] if r else 0.0) + phase.train + phase.sync)
    total = free[-1]
    return {
        "seconds_per_step": total / len(phases),
        "trainer_busy": sum(p.train for p in phases) / total,
        "engine_busy": sum(p.generate for p in phases) / total,
    }


def main() -> None:
    options = parse()
    seen = measured(options.metrics, options.generate_scale)
    phases = random.Random(options.seed).choices(seen, k=options.rollouts)
    means = {name: statistics.mean(getattr(p, name) for p in seen) for name in ("generate", "train", "sync")}
    print(json.dumps({"measured_rollouts": len(seen), **{f"mean_{n}": round(v, 3) for n, v in means.items()}}))
    synchronous = simulate(phases, 0)["seconds_per_step"]
    for k in range(options.max_steps + 1):
        result = simulate(phases, k)
        rounded = {name: round(value, 3) for name, value in result.items()}
        print(json.dumps({"k": k, **rounded, "gain": round(synchronous / result["seconds_per_step"], 3)}))


if __name__ == "__main__":
    main()
