"""Sample the resources that the processes of a long run hold: memory, open files, threads, shared memory and disk.

``python benchmarks/long_run.py --iterations 1000 --output outputs/long_run`` trains a tiny random model through
``miles train`` and samples every process of the run after each ``--every`` iterations. It writes ``held.csv``, a row
per sample and kind of process, and prints each kind's growth between the samples after ``--settled`` iterations: the
median of the first tenth and of the last tenth. Further flags after ``--`` go to ``miles train``.

``python benchmarks/long_run.py --output outputs/long_run --draw curve.svg`` draws ``held.csv`` of an earlier run.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

from miles.base.processes import RUN_FOLDER
from miles.observe.run_files import METRICS, SAMPLES

HIDDEN, HEADS = 64, 4
MODEL = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
MEMORY_BOUND, FRACTION_BOUND = 10 << 20, 0.01  # growth that is allowed: the larger of the two
REWARD = """
def spread(samples):
    return [sum(sample.response_ids) % 7 / 7 for sample in samples]
"""
MORE_BOUND = 1  # open files or threads of a kind
COLUMNS = ("iteration", "kind", "processes", "memory", "files", "threads")
LASTING = (METRICS, SAMPLES, "tensorboard", "iter_")  # prefixes of the files that a run is meant to leave
NO_PROCESSES = ("shared memory", "temporary files", "other files of the run")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--every", type=int, default=5, help="iterations between samples")
    parser.add_argument("--settled", type=int, default=50, help="iterations before growth counts")
    parser.add_argument("--output", type=Path, default=Path("outputs/long_run"))
    parser.add_argument("--draw", type=Path, help="draw the held.csv in --output to this picture, and run nothing")
    parser.add_argument("flags", nargs="*", help="further flags of miles train, after --")
    return parser.parse_args()


def command(args: argparse.Namespace) -> list[str]:
    """Return the run: two prompts with two short answers each, an optimizer step per iteration."""
    flags = f"""--hf-checkpoint model --prompt-data reasoning_gym:chain_sum --custom-rm-path reward:spread --fp32
        --num-rollout {args.iterations} --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8
        --lr 1e-6 --actor-num-gpus-per-node 1 --device cpu --output-dir run"""
    return [sys.executable, "-m", "miles", "train", *flags.split(), *args.flags]


def kind_of(process: psutil.Process) -> str:
    """Return the kind of a process: an actor's name, or the program that it runs."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].partition(".")[0]
    scripts = [word for word in words[1:4] if not word.startswith("-")]
    return Path(scripts[0] if "python" in Path(words[0]).name and scripts else words[0]).name if words else "?"


def sample(root: psutil.Process, iteration: int, output: Path) -> Iterator[dict[str, object]]:
    """Yield a row per kind of process of the tree, and one for shared memory and each kind of files."""
    kinds = defaultdict[str, list[tuple[int, int, int]]](list)
    temporary: set[str] = set()
    for process in [root, *root.children(recursive=True)]:
        try:
            with process.oneshot():
                kinds[kind_of(process)].append((process.memory_info().rss, process.num_fds(), process.num_threads()))
            temporary |= {process.environ().get(RUN_FOLDER, "")} - {""}
        except psutil.NoSuchProcess:
            continue
    for kind, held in sorted(kinds.items()):
        memory, files, threads = map(sum, zip(*held, strict=True))
        yield dict(zip(COLUMNS, (iteration, kind, len(held), memory, files, threads), strict=True))
    sizes = (
        size_of(Path("/dev/shm")),
        sum(size_of(Path(folder)) for folder in temporary),
        size_of(output, without=LASTING),
    )
    for kind, size in zip(NO_PROCESSES, sizes, strict=True):
        yield dict(zip(COLUMNS, (iteration, kind, 0, size, 0, 0), strict=True))


def size_of(folder: Path, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of the files below a folder, except names that begin with ``without``.

    Some files may vanish meanwhile.
    """
    total = 0
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(without)]
        for name in names:
            try:
                total += 0 if name.startswith(without) else (Path(where) / name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def iterations_of(log: Path) -> int:
    """Return the number of the last step in a run's output, 0 before the first."""
    steps = re.findall(r"^step +(\d+)", log.read_text(errors="replace"), flags=re.M)
    return int(steps[-1]) if steps else 0


def growth(rows: list[dict[str, object]], settled: int) -> Iterator[str]:
    """Yield a line per kind of process: its use at first and at last, and whether it stays in its bounds."""
    after = [row for row in rows if int(str(row["iteration"])) >= settled]
    for kind in dict.fromkeys(str(row["kind"]) for row in after):
        own = [row for row in after if row["kind"] == kind]
        tenth = max(1, len(own) // 10)
        first, last = (
            {name: statistics.median(int(str(row[name])) for row in part) for name in COLUMNS[3:]}
            for part in (own[:tenth], own[-tenth:])
        )
        grown = last["memory"] - first["memory"]
        is_bounded = grown <= max(MEMORY_BOUND, FRACTION_BOUND * first["memory"])
        is_flat = all(last[name] - first[name] <= MORE_BOUND for name in ("files", "threads"))
        verdict = "ok" if is_bounded and is_flat else "GROWS"
        memory = " -> ".join(f"{held['memory'] / 2**20:8.1f}" for held in (first, last))
        others = (f"{name} {first[name]:g} -> {last[name]:g}" for name in ("files", "threads"))
        yield f"{kind:24} {memory} MiB  {'  '.join(others)}  {verdict}"


def draw(rows: list[dict[str, str]], picture: Path) -> None:
    """Draw the resident memory of each kind of process over the iterations."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
    newest = {row["kind"]: int(row["memory"]) for row in rows if row["kind"] not in NO_PROCESSES}
    for kind in sorted(newest, key=lambda kind: -newest[kind]):  # the legend is in the order of the curves
        own = [row for row in rows if row["kind"] == kind]
        axes.plot([int(row["iteration"]) for row in own], [int(row["memory"]) / 2**20 for row in own], label=kind)
    axes.set(xlabel="iteration", ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.savefig(picture)


def main() -> None:
    args = parse()
    if args.draw is not None:
        with (args.output / "held.csv").open(newline="") as file:
            draw(list(csv.DictReader(file)), args.draw)
        return
    from miles.models.tiny import character_tokenizer, write_model

    args.output.mkdir(parents=True, exist_ok=True)
    write_model(MODEL, args.output / "model")
    character_tokenizer().save_pretrained(args.output / "model")
    (args.output / "reward.py").write_text(REWARD)
    log, rows, sampled = args.output / "run.log", list[dict[str, object]](), 0
    with log.open("w") as stream, (args.output / "held.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        run = subprocess.Popen(command(args), cwd=args.output, stdout=stream, stderr=subprocess.STDOUT)
        root = psutil.Process(run.pid)
        while run.poll() is None:
            done = iterations_of(log)
            if done >= sampled + args.every:
                sampled = done
                new = list(sample(root, done, args.output / "run"))
                table.writerows(new)
                file.flush()
                rows += new
            time.sleep(0.5)
    if run.returncode:
        sys.exit(f"the run ended with status {run.returncode}; see {log}")
    print(f"{iterations_of(log)} iterations; {size_of(args.output / 'run') / 2**20:.1f} MiB in the run's folder")
    print(*growth(rows, args.settled), sep="\n")


if __name__ == "__main__":
    main()
