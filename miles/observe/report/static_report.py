"""report.html: the page of a run in one file, with all curves and verdicts and a bounded number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.base.host.disk_faults import naming_disk
from miles.observe.report.ledger import is_recorded
from miles.observe.report.page import json_in_html, single_file
from miles.observe.report.run_view import MOST_BARS, RunView, grouped
from miles.observe.tracking.run_files import REPORT
from miles.observe.tracking.sample_file import Iteration, Row, spread_order

MOST_BYTES = 20_000_000
MOST_SAMPLES = 2000
MOST_POINTS = 2000
_PER_SAMPLE = 60  # bytes of the key of a sample and of the braces around it


def write_report(folder: Path, samples_per_iteration: int, path: Path | None = None) -> Path:
    """Write the report of the run in ``folder``; return its path, ``report.html`` in the folder unless one is given.

    Args:
        folder: The ``--output-dir`` of a run.
        samples_per_iteration: ``--report-samples``: answers shown of an iteration, spread over its prompts. If there
            are too many for the file, iterations spread over the run are shown.
        path: The file to write.

    Raises:
        ValueError: The folder holds no run, or one of its files is damaged.
        WriteFailed: The disk is full, or cannot be written for another reason.
    """
    view = RunView(folder)
    data = report_data(view, samples_per_iteration)
    target = path or folder / REPORT
    page = single_file(view.header.title, data)
    if target.exists() and not target.is_file():  # a pipe, for example
        target.write_bytes(page)
        return target
    new = target.with_name(f".{target.name}.new")  # renamed into place: a full disk keeps the report that was there
    with naming_disk(target, new):
        new.write_bytes(page)
        new.replace(target)
    return target


def report_data(view: RunView, samples_per_iteration: int) -> dict[str, Any]:
    """Return the data of the page, in at most ``MOST_BYTES``: the curves first, then samples as far as there is room.

    Curves of more than ``MOST_POINTS`` steps keep the smallest and the largest value of each part.
    """
    overview = view.overview()
    names = [name for name in view.metrics_file.names if not name.startswith("time/")]
    data: dict[str, Any] = {
        "overview": overview,
        "metrics": view.metrics(names, None, None, MOST_POINTS),
        "phases": view.phases(None, None, MOST_BARS),
    }
    room = MOST_BYTES - len(single_file(view.header.title, data)) - _PER_SAMPLE * MOST_SAMPLES
    data["iterations"], data["details"] = _samples(view, samples_per_iteration, room)
    return data


def spread(count: int, among: int) -> list[int]:
    """Return ``count`` positions of ``among``, evenly spread, first and last among them; all if there are fewer.

    >>> spread(3, 9)
    [0, 4, 8]
    """
    if among <= count:
        return list(range(among))
    if count < 2:
        return list(range(count))
    return [i * (among - 1) // (count - 1) for i in range(count)]


def _samples(view: RunView, per_iteration: int, room: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answers of iterations and the details of samples, by the keys under which the page asks for them.

    First as many samples as possible get in, then the tokens of samples that are spread over the run.
    """
    shown = _iterations(view, MOST_SAMPLES // per_iteration) if per_iteration else []
    iterations: dict[str, Any] = {}
    details: dict[str, Any] = {}
    tokens: list[tuple[str, dict[str, Any]]] = []
    share = room / max(len(shown), 1)  # of the bytes, so that no long iteration takes those of later ones
    left = 0.0
    for iteration in shown:
        left += share
        kept: list[Row] = []
        for index in _chosen(iteration.rows, per_iteration):
            whole = view.detail(iteration.rows, index) | {"index": len(kept)}
            short = whole | {"tokens": [], "columns": {}}
            size = len(json_in_html([short, grouped([iteration.rows[index]])]))
            if size <= left:
                left -= size
                key = f"{iteration.step}/{len(kept)}"
                details[key] = short
                kept.append(iteration.rows[index])
                if whole["tokens"]:
                    tokens.append((key, {name: whole[name] for name in ("tokens", "columns")}))
        if kept:
            iterations[str(iteration.step)] = {"step": iteration.step, "groups": grouped(kept)}
    for position in spread_order(len(tokens)):
        key, columns = tokens[position]
        left -= len(json_in_html(columns))
        if left < 0:
            break
        details[key] |= columns
    return iterations, details


def _chosen(rows: Sequence[Row], count: int) -> list[int]:
    """Return the positions of ``count`` rows, spread evenly so that they show different prompts.

    Rows with the trainer's values of their tokens come before the others.
    """
    recorded = [index for index, row in enumerate(rows) if is_recorded(row)]
    others = [index for index, row in enumerate(rows) if not is_recorded(row)]
    first = _evenly(recorded, count)
    return sorted([*first, *_evenly(others, count - len(first))])


def _evenly(positions: Sequence[int], count: int) -> list[int]:
    count = min(count, len(positions))
    return [positions[number * len(positions) // count] for number in range(count)]


def _iterations(view: RunView, most: int) -> list[Iteration]:
    """Return at most ``most`` of the stored iterations, spread over the run."""
    first = view.samples_file.iteration(0)
    if first is None:
        return []
    span = first.last - first.step
    wanted = spread(most, span + 1)
    by_step: dict[int, Iteration] = {}
    for offset in wanted:
        if by_step and first.step + offset <= max(by_step):
            continue
        iteration = view.samples_file.iteration(first.step + offset)
        assert iteration is not None, "the file was not empty"
        by_step[iteration.step] = iteration
    return list(by_step.values())
