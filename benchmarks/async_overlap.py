"""Simulate the gain of ``--async-steps K`` on a cluster from the phase times of a synchronous run.

``python benchmarks/async_overlap.py RUN/metrics.jsonl [--generate-scale 4] [--rollouts 1000]``

Generation and training use separate devices, as on a cluster. Each simulated iteration takes the phase times of a
random measured one (generate, train and sync together), and follows the rules of rollout/ordering.py: iteration r is
generated after iteration r - 1, with weights of version r - K; step r needs the data of iteration r and the previous
step; weights arrive between two iterations. ``--generate-scale`` multiplies the generation time, for tasks with longer
answers. Prints one JSON object per K: seconds per step, the share of time that trainer and engine work, and the gain
over K = 0.

``--fully-async`` has the same bound and the same figures here. In practice it gains more: it also fills the tail of an
iteration, when few responses are still running, which phase times do not show. ``benchmarks/async_on_cpu.py`` measures
the two-core case instead of simulating it.
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
    """The seconds of each phase of one iteration."""

    generate: float
    train: float
    sync: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run with --async-steps 0")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--generate-scale", type=float, default=1.0)
    parser.add_argument("--max-steps", type=int, default=2, help="largest K")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def measured(path: Path, generate_scale: float) -> list[Phases]:
    """Return the phase times of every iteration in ``path`` except the first, which is warm-up."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    phases = [
        Phases(generate_scale * row["time/generate"], row["time/train"], row["time/sync_weights"])
        for row in rows
        if "time/generate" in row and "time/train" in row
    ]
    if len(phases) < 2:
        raise ValueError(f"{path}: {len(phases)} iterations with phase times; give the metrics.jsonl of a longer run")
    return phases[1:]


def simulate(phases: list[Phases], k: int) -> dict[str, float]:
    """Return the seconds per step and the share of time that each side works, with ``--async-steps k``.

    The estimate is conservative: a weight sync occupies both trainer and engine for its whole measured time.
    """
    generated: list[float] = []  # when the data of iteration r is complete
    free: list[float] = []  # when the trainer has finished step r and sent its weights
    for r, phase in enumerate(phases):
        begin = generated[r - 1] if r else 0.0
        if r > k:  # version r - k exists after step r - k - 1 and is loaded between two iterations
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
