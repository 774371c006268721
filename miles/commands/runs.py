"""List the runs below a folder: state, iterations, last metrics, checkpoints."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles.base.storage import is_url
from miles.base.text import InputError
from miles.commands.saved_runs.run import SavedRun, runs_at
from miles.config.command_parser import CommandParser
from miles.types.metrics import held_out_metrics

HEADINGS = ("RUN", "STATE", "ITERATIONS", "REWARD", "HELD-OUT", "CHECKPOINTS")


def main(argv: Sequence[str]) -> int:
    """Print a table of the runs, or JSON, and return 0.

    Raises:
        SystemExit: With status 2 for wrong arguments.
    """
    parser = CommandParser(prog="miles runs", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "folder",
        nargs="?",
        default="outputs",
        metavar="FOLDER",
        help="where to look: a folder, or a URL such as s3://bucket with runs that save there (default: outputs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array, with all metrics and checkpoints")
    options = parser.parse_args(list(argv))
    if not is_url(options.folder) and not Path(options.folder).is_dir():
        parser.error(f"{options.folder}: no such folder; give one that holds runs")
    try:
        runs = [_described(label, folder) for label, folder in runs_at(options.folder)]
    except InputError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(runs, indent=1))
    elif not runs:
        print(f"no runs in {options.folder}")
    else:
        print("\n".join(_table([HEADINGS, *map(_row, runs)])))
    return 0


def _described(label: str, folder: Path) -> dict[str, Any]:
    """Return the contents of the files of a run in ``folder``, or their fault."""
    try:
        run = SavedRun(folder)
        newest, best = run.newest_complete(), run.best()
        return {
            "run": label,
            "state": run.state.value,
            "iterations": run.iterations,
            "total_iterations": run.total_iterations,
            "step": run.steps,
            "metrics": run.last_metrics(),
            "checkpoints": [
                {"folder": str(c.folder), "iterations": c.iterations, "step": c.steps, "complete": c.is_complete}
                for c in run.checkpoints()
            ],
            "newest_complete": None if newest is None else str(newest.folder),
            "best": None if best is None else asdict(best) | {"folder": best.name},
        }
    except (InputError, ValueError) as error:
        return {"run": label, "state": "unreadable", "error": str(error)}


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    if "error" in run:
        return (run["run"], run["state"], run["error"], "", "", "")
    metrics = run["metrics"]
    held_out = [f"{metrics[name]:.3f}" for name in held_out_metrics(metrics).values()]
    reward = metrics.get("rollout/reward")
    return (
        run["run"],
        run["state"],
        f"{run['iterations']}/{run['total_iterations']}",
        "-" if reward is None else f"{reward:.3f}",
        " ".join(held_out) or "-",
        _checkpoints(run["checkpoints"], run["newest_complete"], run["best"]),
    )


def _checkpoints(checkpoints: list[dict[str, Any]], newest: str | None, best: dict[str, Any] | None) -> str:
    if not checkpoints:
        return "-"
    damaged = sum(not checkpoint["complete"] for checkpoint in checkpoints)
    text = f"{len(checkpoints)}, newest complete: {'none' if newest is None else Path(newest).name}"
    text += f" ({damaged} damaged)" if damaged else ""
    return text if best is None else f"{text}, best: {best['folder']} ({best['metric']} {best['value']:.4g})"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows with aligned columns; the last one is not padded, nor is an error cut."""
    whole = [row for row in rows if row[1] != "unreadable"]
    widths = [max(len(row[i]) for row in (whole if i > 1 else rows)) for i in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
