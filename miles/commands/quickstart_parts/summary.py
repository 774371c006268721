"""Summarize a run in one line: held-out accuracy before and after, and the seconds of training."""

import argparse
import json
from pathlib import Path

from miles.base.flags import count

_KINDS = ("accuracy", "reward")


def summarize(metrics_file: Path, name: str) -> str:
    """Return ``held-out accuracy A -> B in S s``: first and last ``eval/<name>/accuracy``, sum of ``time/step``.

    An evaluation whose rewards are not all 0 or 1 has no accuracy; then the rewards are compared.
    """
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    series = {kind: [row[f"eval/{name}/{kind}"] for row in rows if f"eval/{name}/{kind}" in row] for kind in _KINDS}
    kind = max(_KINDS, key=lambda kind: len(series[kind]))  # the first of equals
    values = series[kind]
    if len(values) < 2:
        raise ValueError(
            f"{metrics_file}: {count(len(values), 'evaluation')} of {name}; a summary needs two, before and after"
        )
    seconds = sum(row.get("time/step", 0.0) for row in rows)
    return f"held-out {kind} {values[0]:.3f} -> {values[-1]:.3f} in {seconds:.0f} s"


def main() -> None:
    """Print ``<label>: <summary>``."""
    parser = argparse.ArgumentParser(prog="python -m miles.commands.quickstart_parts.summary", description=__doc__)
    parser.add_argument("metrics_file", type=Path)
    parser.add_argument("--label", default="quickstart")
    parser.add_argument("--set", default="heldout", help="name of the evaluation set")
    options = parser.parse_args()
    print(f"{options.label}: {summarize(options.metrics_file, options.set)}")


if __name__ == "__main__":
    main()
