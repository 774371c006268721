"""Keep the output of the other scripts of this folder, and make tables for the documentation from it.

    python benchmarks/reducers.py | python benchmarks/records.py add reducers "one thread of two quiet cores"

``add NAME CONDITIONS`` reads the JSON of a script from standard input and adds a row to records.jsonl, with the date,
the commit and the processor. The built docs have the tables, each at a line ``<!-- table: NAME -->``
(scripts/docs_hooks.py). A new comparison is an entry in ``COMPARISONS``, a new table one in ``TABLES``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_history import commit_of, processor_name  # benchmarks/step_history.py

RECORDS = Path(__file__).with_name("records.jsonl")
Figures = Any  # the JSON of a script


@dataclass(frozen=True)
class Comparison:
    """The comparison that a script makes.

    Attributes:
        subject: The two things that are compared.
        result: The conclusion from the figures, in words.
    """

    subject: str
    result: Callable[[Figures], str]


@dataclass(frozen=True)
class Record:
    """A run of a script.

    Attributes:
        benchmark: The name of the script, which is also its key in ``COMPARISONS``.
        figures: Its JSON output.
        conditions: The model, the precision, and what else used the machine.
    """

    benchmark: str
    date: str
    commit: str
    processor: str
    conditions: str
    figures: Figures

    @property
    def measured(self) -> str:
        """Where and when it was measured, in words."""
        return f"{self.conditions}; {self.processor}; {self.date}"


def times(ratio: float) -> str:
    """Return a ratio of speeds in words.

    >>> times(2.371), times(12.4)
    ('2.37 times as fast', '12.4 times as fast')
    """
    return f"{ratio:.3g} times as fast"


def _trl(figures: Figures) -> str:
    median, ratios = figures["median_seconds"], figures["trl_over_miles"]
    steps = f"{median['miles']['step']:.1f} and {median['trl']['step']:.1f} s per step"
    parts = ", ".join(f"{part} {ratios[part]:.1f}" for part in ("generate", "train") if part in ratios)
    learned = figures.get("last_rewards", {})
    rewards = f"; last rewards {learned['miles']:.2f} and {learned['trl']:.2f}" if learned else ""
    return f"{steps}: {times(ratios['step'])} ({parts}){rewards}"


def _torch_engine(figures: Figures) -> str:
    speeds = figures["tokens_per_second"]
    work = f"{figures['sequences']} sequences of {figures['new_tokens']} tokens"
    return f"{speeds['miles']:.0f} and {speeds['transformers']:.0f} tokens/s, {work}: {times(figures['ratio'])}"


def _backends(figures: Figures) -> str:
    ratios = figures["megatron_over_fsdp"]
    return f"{ratios['step']:.2f} times the seconds of a step, {ratios['cpu']:.2f} times the processor time"


def _reducers(figures: Figures) -> str:
    ratios = [row["ratio"] for row in figures["results"]]
    longest = [row["longest"] for row in figures["results"]]
    speeds = f"{min(ratios):.2g} to {max(ratios):.2g} times as fast"
    return f"{speeds}, with answers of at most {max(longest)} and {min(longest)} tokens"


def _dynamic(figures: Figures) -> str:
    exchanged = figures["exchanged"]
    share = f"{exchanged['dynamic'] / exchanged['static']:.0%} of the tokens exchanged"
    return f"{times(figures['static_over_dynamic'])}, with {share}"


def _async(rows: Figures) -> str:
    named = {"tiny": "a tiny model", "judge": "a reward that waits", "quickstart": "the quickstart"}
    return ", ".join(f"{times(row['gain'])} with {named[row['case']]}" for row in rows)


def _delta(figures: Figures) -> str:
    rates = {name.removeprefix("lr "): value for name, value in figures.items() if name.startswith("lr ")}
    return "; ".join(
        f"after steps at {rate}: {values['bytes_ratio']:.1%} of the bytes, "
        f"{values['disk_delta_seconds'] / values['disk_seconds']:.1f} times the seconds without transfer"
        for rate, values in rates.items()
    )


def _neighbors(figures: Figures) -> str:
    values = figures["default"]
    speed, seconds = (
        values[f"{what}, alongside a busy process"] / values[f"{what}, alone"]
        for what in ("tokens per second", "seconds of a pass")
    )
    return f"{speed:.2f} of the tokens per second, {seconds:.1f} times the seconds of a pass"


COMPARISONS: Mapping[str, Comparison] = {
    "vs_trl": Comparison("a step of miles with one of TRL 1.16: same model, prompts and batch", _trl),
    "torch_engine": Comparison("the embedded engine with transformers' `generate`", _torch_engine),
    "backends": Comparison("Megatron-Core with FSDP2, one rank", _backends),
    "reducers": Comparison("the loss over a batch with a loop over its samples", _reducers),
    "dynamic_context_parallel": Comparison("dynamic with static context parallelism", _dynamic),
    "async_on_cpu": Comparison("asynchronous with synchronous training, two cores", _async),
    "weight_delta": Comparison("weights sent as a delta with all weights", _delta),
    "busy_neighbors": Comparison("engine and trainer on busy cores with those on idle cores", _neighbors),
}


def comparisons(records: Sequence[Record]) -> str:
    """Return the newest record of each comparison under each of its conditions."""
    newest = {(r.benchmark, r.processor, r.conditions): r for r in records if r.benchmark in COMPARISONS}
    order = [*COMPARISONS]
    rows = [
        [
            COMPARISONS[record.benchmark].subject,
            f"`benchmarks/{record.benchmark}.py`",
            COMPARISONS[record.benchmark].result(record.figures),
            record.measured,
        ]
        for record in sorted(newest.values(), key=lambda record: order.index(record.benchmark))
    ]
    return _table(["compared", "script", "result", "measured"], rows)


def start_up(records: Sequence[Record]) -> str:
    """Return the seconds from the start of a run to its first token, in total and by part."""
    record = _newest(records, "start_up")
    ways = record.figures
    kinds = _union(values["cpu_by_process"] for values in ways.values())
    totals = [
        [way, f"{values['seconds']:.1f}", f"{values['cpu_seconds']:.1f}"]
        + [f"{values['cpu_by_process'][kind]:.1f}" if kind in values["cpu_by_process"] else "" for kind in kinds]
        for way, values in ways.items()
    ]
    phases = [values["phases"] for values in ways.values()]
    spans = [
        [part] + ["{:.1f} to {:.1f}".format(*values[part]) if part in values else "" for values in phases]
        for part in _union(phases)
    ]
    return "\n\n".join(
        [
            "Seconds, and processor seconds of all processes and of each kind:",
            _table(["backend and engine", "seconds", "processor seconds", *kinds], totals),
            "Begin and end of each part, in seconds after the start of the process:",
            _table(["part", *ways], spans),
            _source(record),
        ]
    )


def schedule_scale(records: Sequence[Record]) -> str:
    """Return the seconds of scheduling a large step, by kind of micro-batches and processor."""
    newest = _newest_by_processor(records, "schedule_scale")
    sizes = {"samples", "ranks", "columns_gb"}
    ways = [way for way in _union(record.figures for record in newest.values()) if way not in sizes]
    rows = [[way, *(f"{record.figures[way]['seconds']:.1f}" for record in newest.values())] for way in ways]
    table = _table(["micro-batches", *(f"seconds ({processor})" for processor in newest)], rows)
    figures = [*newest.values()][-1].figures
    peak = max(record.figures[way]["peak_gb"] for record in newest.values() for way in ways)
    size = f"{figures['samples']:,} samples over {figures['ranks']:,} ranks, in at most {peak:.2f} GB"
    return f"{table}\n\n{size}. {_source(*newest.values())}"


def busy_neighbors(records: Sequence[Record]) -> str:
    """Return what engine and trainer reach alone and alongside a busy process, by OpenMP's settings."""
    record = _newest(records, "busy_neighbors")
    columns = _union(record.figures.values())
    rows = [[name, *(f"{values[column]:.3g}" for column in columns)] for name, values in record.figures.items()]
    return f"{_table(['setting', *columns], rows)}\n\n{_source(record)}"


def quickstart_steps(records: Sequence[Record]) -> str:
    """Return the seconds of the parts of a quickstart step by processor, and the accuracy of the newest runs."""
    newest = _newest_by_processor(records, "quickstart_steps")
    medians = {processor: record.figures["median_seconds"] for processor, record in newest.items()}
    parts = [[part, *(f"{seconds[part]:.2f}" for seconds in medians.values())] for part in _union(medians.values())]
    record = [*newest.values()][-1]
    runs = record.figures["runs"]
    steps = _union(run["accuracy"] for run in runs)
    learned = [
        [str(run["seed"]), f"{run['backend']}, {run['engine']}"]
        + [f"{run['accuracy'][step]:.3f}" if step in run["accuracy"] else "" for step in steps]
        + [str(run["seconds"])]
        for run in runs
    ]
    return "\n\n".join(
        [
            _table(["part", *(f"seconds ({processor})" for processor in newest)], parts),
            "Accuracy on held-out prompts after so many steps, and the seconds of all steps:",
            _table(["seed", "backend and engine", *steps, "seconds"], learned),
            _source(record),
        ]
    )


def levers(records: Sequence[Record]) -> str:
    """Return how many times as fast the levers of the newest record make their parts of a step."""
    return _levers(_newest(records, "levers"), tried=False)


def levers_tried(records: Sequence[Record]) -> str:
    """Return the same of the ideas that miles does not follow."""
    return _levers(_newest(records, "levers"), tried=True)


def _levers(record: Record, tried: bool) -> str:
    rows: list[list[str]] = []
    previous = ""
    for row in record.figures["levers"]:
        if row["tried"] != tried:
            continue
        if "tokens" in row:
            both = [f"{row['tokens'][way]:,} tokens" for way in ("with", "without")]
        else:
            both = [f"{row['processor_seconds'][way]:.3g}" for way in ("with", "without")]
        name = "" if row["lever"] == previous else f"{row['lever']}: {row['what']}{_notes(row)}"
        rows.append([name, row["part"], f"{row['times']:.2f}", *both])
        previous = row["lever"]
    table = _table(["lever", "part", "times as fast", "processor seconds with it", "without it"], rows)
    return f"{table}\n\nMeasured: {record.figures['dtype']}, {record.measured}."


def _notes(row: Figures) -> str:
    """Return the costs of a lever: memory, or a longer first pass, as of compilation."""
    notes = ""
    if "peak_gib" in row and not row["tried"]:  # the processes have computed the same parts
        notes += f"; a peak of {row['peak_gib']['with']:.1f} instead of {row['peak_gib']['without']:.1f} GiB"
    if row["tried"] and "tokens" not in row and row["first_wall_seconds"]["with"] > row["wall_seconds"]["with"] + 15:
        notes += f"; the first pass took {row['first_wall_seconds']['with']:.0f} s"
    return notes


def backends(records: Sequence[Record]) -> str:
    """Return the seconds of the parts of a step of both backends, by processor and conditions."""
    newest = {(r.processor, r.conditions): r for r in records if r.benchmark == "backends"}
    parts = _union(r.figures["megatron_over_fsdp"] for r in newest.values())
    rows = []
    for record in newest.values():
        figures = record.figures
        for name in ("fsdp", "megatron"):
            rows.append([record.measured, name, *(f"{figures['median_seconds'][name][part]:.2f}" for part in parts)])
        rows.append(["", "ratio", *(f"{figures['megatron_over_fsdp'][part]:.2f}" for part in parts)])
    return _table(["measured", "", *(part.replace("_", " ") for part in parts)], rows)


def weight_delta(records: Sequence[Record]) -> str:
    """Return what changes in the weights after steps at a learning rate, and the cost of a delta and of all weights."""
    record = _newest(records, "weight_delta")
    rows = [
        [
            name.removeprefix("lr "),
            f"{values['changed_fraction']:.1%}",
            f"{values['bytes_ratio']:.1%}",
            f"{values['disk_delta_seconds']:.2f}",
            f"{values['disk_seconds']:.2f}",
        ]
        for name, values in record.figures.items()
        if name.startswith("lr ")
    ]
    heads = ["learning rate", "elements that change", "bytes of the delta", "seconds, `disk-delta`", "seconds, `disk`"]
    return f"{_table(heads, rows)}\n\n{_source(record)}"


def async_on_cpu(records: Sequence[Record]) -> str:
    """Return the seconds of the phases of a step with and without overlap."""
    record = _newest(records, "async_on_cpu")
    rows = [[row["case"], _phases(row["k=0"]), _phases(row["k=1"]), f"{row['gain']:.2f}"] for row in record.figures]
    return f"{_table(['case', 'K = 0', 'K = 1', 'gain'], rows)}\n\n{_source(record)}"


def rollout_workers(records: Sequence[Record]) -> str:
    """Return the processor time, memory and files of generation in several processes."""
    record = _newest(records, "rollout_workers")
    columns = {
        "requests at once": "requests_at_once",
        "workers": "workers",
        "at the server at once": "connections",
        "seconds": "seconds",
        "CPU ms per request": "cpu_ms_per_request",
        "of it in the rollout process": "of_which_rollout_process",
        "Ray's own": "ray_cpu_ms_per_request",
        "memory in all, GiB": "peak_memory_gb",
        "open files of a process": "most_open_files_of_a_process",
    }
    rows = [[f"{row[key]:,}" for key in columns.values()] for row in record.figures]
    return f"{_table([*columns], rows)}\n\n{_source(record)}"


def profiles(records: Sequence[Record]) -> str:
    """Return the seconds of a recorded iteration by process and kind of operation, for each backend and engine."""
    record = _newest(records, "profiles")
    figures = record.figures
    kinds = [
        (process, kind)
        for process in _union(each["processes"] for each in figures.values())
        for kind in _union(each["processes"][process] for each in figures.values())
    ]
    rows = [["the iteration", "", *(f"{each['seconds']:.2f}" for each in figures.values())]]
    rows += [
        [process, kind, *(f"{each['processes'][process].get(kind, 0):.2f}" for each in figures.values())]
        for process, kind in kinds
    ]
    return f"{_table(['process', 'kind', *figures], rows)}\n\n{_source(record)}"


def _phases(seconds: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if name != "step")
    return f"{seconds['step']:.2f} s: {parts}"


def rehearsal_scale(records: Sequence[Record]) -> str:
    """Return what rehearsals of large models take, by layout and processor."""
    newest = _newest_by_processor(records, "rehearsal_scale")
    rows = [
        [layout, processor, f"{values['seconds']:.0f}", f"{values['cpu_seconds']:.0f}", f"{values['peak_gb']:.1f}"]
        for processor, record in newest.items()
        for layout, values in record.figures.items()
    ]
    heads = ["layout on 1,024 ranks", "processor", "seconds", "processor seconds", "GB of the largest process"]
    return f"{_table(heads, rows)}\n\n{_source(*newest.values())}"


TABLES: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "comparisons": comparisons,
    "start_up": start_up,
    "schedule_scale": schedule_scale,
    "busy_neighbors": busy_neighbors,
    "quickstart_steps": quickstart_steps,
    "levers": levers,
    "levers_tried": levers_tried,
    "backends": backends,
    "weight_delta": weight_delta,
    "async_on_cpu": async_on_cpu,
    "rollout_workers": rollout_workers,
    "profiles": profiles,
    "rehearsal_scale": rehearsal_scale,
}
OF_OTHER_SCRIPTS = {"comparisons", "levers_tried"}  # tables without a script of their name


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _union(names: Iterable[Iterable[str]]) -> list[str]:
    return [*dict.fromkeys(name for some in names for name in some)]


def _source(*records: Record) -> str:
    """Return the sentence under a table that states where and when it was measured."""
    return f"Measured: {', and '.join(record.measured for record in records)}."


def _newest_by_processor(records: Sequence[Record], benchmark: str) -> dict[str, Record]:
    return {record.processor: record for record in records if record.benchmark == benchmark}


def _newest(records: Sequence[Record], benchmark: str) -> Record:
    return [record for record in records if record.benchmark == benchmark][-1]


def read_json(text: str) -> Figures:
    """Return the value of ``text``: one JSON value, or the list of its lines' values."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def read_records(path: Path = RECORDS) -> list[Record]:
    """Return the rows of the file, oldest first."""
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Add a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="add what a script printed, from standard input")
    adding.add_argument("benchmark", choices=sorted({*COMPARISONS, *TABLES} - OF_OTHER_SCRIPTS))
    adding.add_argument("conditions", help="model, precision, and what else used the machine")
    options = parser.parse_args()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    figures = read_json(sys.stdin.read())
    record = Record(options.benchmark, today, commit_of(), processor_name(), options.conditions, figures)
    with RECORDS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(vars(record)) + "\n")


if __name__ == "__main__":
    main()
