"""The page of a run: its files, served or put together into report.html, and the data that it asks for."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from miles.base.disk_faults import naming_disk
from miles.base.locks import is_held
from miles.base.secrets import public
from miles.observe.charts import QUESTIONS, run_charts, tiles
from miles.observe.health import judge, verdicts
from miles.observe.metrics_file import MetricsFile, to_json
from miles.observe.report.ledger import is_recorded, ledger, share, token_columns
from miles.observe.run_files import (
    METRICS,
    REPORT,
    SAMPLES,
    Iteration,
    Row,
    RunFiles,
    RunHeader,
    SampleFile,
    spread_order,
)

STATIC = Path(__file__).with_name("static")
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "source.js", "formula.js", "charts.js", "tokens.js", "samples.js", "page.js")


def asset(name: str) -> str:
    """Return the text of a file of the page. Only the files of ``STYLES`` and ``SCRIPTS`` exist."""
    assert name in STYLES or name in SCRIPTS
    return (STATIC / name).read_text(encoding="utf-8")


def live_page() -> str:
    """Return the page that loads its parts and its data from the server."""
    links = "".join(f'<link rel="stylesheet" href="static/{name}">' for name in STYLES)
    scripts = "".join(f'<script src="static/{name}"></script>' for name in SCRIPTS)
    return _document("miles", links, scripts)


def single_file(title: str, data: Any) -> bytes:
    """Return the page with everything inside it. Its policy allows these very scripts and styles, nothing else."""
    styles, scripts = [asset(name) for name in STYLES], [asset(name) for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += "".join(f"<style>{text}</style>" for text in styles)
    body = f'<script type="application/json" id="data">{json_in_html(data).decode("utf-8")}</script>'
    document = _document(title, head, body + "".join(f"<script>{text}</script>" for text in scripts))
    return document.encode("utf-8", "xmlcharrefreplace")


def json_in_html(data: Any) -> bytes:
    """Return JSON that can be inside an HTML element: no "<" can end it."""
    return to_json(data).replace(b"<", b"\\u003c")


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)


def _document(title: str, head: str, end: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>{head}</head><body><main></main>{end}</body></html>\n"
    )


# Seconds by phase, each second in one phase only.
#
# The main loop times its phases one after another. The trainer times the parts of ``time/train``, which
# replace it. Time in no phase is ``other``. With ``--async-steps`` generation overlaps the step: its
# ``time/rollout`` is no part of the step's seconds and is left out.


WALL = "time/step"
TRAIN = "time/train"
INSIDE_TRAIN = ("log_probs", "token_selection", "forward_backward", "optimizer", "critic", "ref_update")
OVERLAPPING = ("rollout",)
ORDER = ("generate", *INSIDE_TRAIN, "train, other", "sync_weights", "offload", "eval", "save", "other")


def seconds_by_phase(row: Mapping[str, float]) -> dict[str, float]:
    """Return the phases of one iteration; they add up to its ``time/step``.

    >>> seconds_by_phase({"time/step": 10.0, "time/train": 6.0, "time/forward_backward": 5.0, "time/generate": 3.0})
    {'generate': 3.0, 'forward_backward': 5.0, 'train, other': 1.0, 'other': 1.0}
    """
    timed = {name.removeprefix("time/"): s for name, s in row.items() if name.startswith("time/") and math.isfinite(s)}
    wall, train = timed.pop("step", math.nan), timed.pop("train", None)
    phases = {name: seconds for name, seconds in timed.items() if name not in OVERLAPPING}
    if train is not None:
        inside = {name: phases[name] for name in INSIDE_TRAIN if name in phases}
        # The ranks time the parts themselves, and clocks differ: more than the whole is scaled down to it.
        scale = min(1.0, train / max(sum(inside.values()), 1e-12))
        phases |= {name: seconds * scale for name, seconds in inside.items()}
        phases["train, other"] = max(0.0, train - sum(inside.values()))
    if math.isfinite(wall):
        phases["other"] = max(0.0, wall - sum(phases.values()))
    return {name: phases[name] for name in sorted(phases, key=_position)}


def _position(name: str) -> int:
    return ORDER.index(name) if name in ORDER else ORDER.index("other")


def iterations(metrics: MetricsFile, rows: range) -> list[tuple[int, dict[str, float]]]:
    """Return the step and the phases of each iteration: its rows, up to the one with ``time/step``, added up."""
    names = [name for name in metrics.names if name.startswith("time/")]
    columns = {name: metrics.column(name) for name in names}
    iterations: list[tuple[int, dict[str, float]]] = []
    summed: dict[str, float] = {}
    for index in rows:
        for name, column in columns.items():
            if math.isfinite(column[index]):
                summed[name] = summed.get(name, 0.0) + column[index]
        if WALL in summed:
            iterations.append((metrics.steps[index], seconds_by_phase(summed)))
            summed = {}
    return iterations


def phase_bars(metrics: MetricsFile, first: float | None, last: float | None, most: int) -> dict[str, Any]:
    """Return ``{"steps": [...], "phases": {name: [seconds]}, "per_bar": n}`` of at most ``most`` bars.

    A bar of several iterations shows their mean, and is named by the last of them.
    """
    rows = iterations(metrics, metrics.rows_between(first, last))
    per_bar = max(1, math.ceil(len(rows) / most))
    bars = [rows[i : i + per_bar] for i in range(0, len(rows), per_bar)]
    names = sorted({name for _, phases in rows for name in phases}, key=_position)
    return {
        "steps": [bar[-1][0] for bar in bars],
        "phases": {name: [_mean(bar, name) for bar in bars] for name in names},
        "per_bar": per_bar,
    }


def _mean(bar: Sequence[tuple[int, Mapping[str, float]]], name: str) -> float:
    return float(f"{sum(phases.get(name, 0.0) for _, phases in bar) / len(bar):.4g}")


# A run folder as the page asks for it: every answer is a small piece of JSON.


MOST_POINTS = 1500
MOST_BARS = 200
SHORT_TEXT = 2000  # characters of an answer in the list of an iteration
MOST_IMAGES = 4  # of a prompt
_THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,16000}")

Json = dict[str, Any]


class RunView:
    """The answers to everything that the page asks about one run. Calls may come from several threads.

    Raises:
        ValueError: The folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = RunHeader.load(folder)
        self.metrics_file = MetricsFile(folder / METRICS)
        self.samples_file = SampleFile(folder / SAMPLES)
        self._lock = threading.Lock()

    @property
    def revision(self) -> str:
        """A text that changes whenever the files have grown."""
        samples = self.samples_file.path
        size = samples.stat().st_size if samples.is_file() else 0
        return f"{self.metrics_file.revision}-{size}-{self._state()[0]}"

    def overview(self, since: str = "") -> Json:
        """Return the data that the page shows at once; only ``{"revision": …}`` if nothing has changed ``since``."""
        with self._lock:
            self.metrics_file.refresh()
            revision = self.revision
            if since == revision:
                return {"revision": revision}
            self.header = RunHeader.load(self.folder)  # a new run in the same folder has another one
            header, metrics = self.header, self.metrics_file
            state, why = self._state()
            return {
                "revision": revision,
                "title": header.title,
                "folder": self.folder.resolve().name,
                "state": state,
                "why": why,
                "answer": asdict(judge(metrics, header.settings, state == "running", header.total_steps)),
                "words": header.objective_words,
                "formula": header.objective_formula,
                "total_steps": header.total_steps,
                "steps": [metrics.steps[0], metrics.steps[-1]] if metrics.steps else None,
                "tiles": tiles(metrics),
                "charts": run_charts(metrics, header.settings),
                "questions": QUESTIONS,
                "verdicts": [asdict(verdict) for verdict in verdicts(metrics, header.settings)],
                "settings": settings_table(header),
            }

    def _state(self) -> tuple[str, str]:
        """Return "running", "finished", "stopped" or "failed", and why."""
        files = RunFiles(self.folder)
        done = self.metrics_file.steps
        last = files.ended_early_after
        if (end := files.end) is not None:
            return end
        if is_held(self.folder):
            return "running", ""
        if done and done[-1] >= (self.header.total_steps if last is None else last):
            return "finished", ""
        return "failed", "no launcher is alive, and the run has left no reason: it was killed, or the machine stopped"

    def metrics(self, names: Sequence[str], first: float | None, last: float | None, limit: int = MOST_POINTS) -> Json:
        """Return the points of some metrics in a range of steps."""
        with self._lock:
            return self.metrics_file.points(names, first, last, limit)

    def phases(self, first: float | None, last: float | None, most: int = MOST_BARS) -> Json:
        """Return the seconds by phase in a range of steps."""
        with self._lock:
            return phase_bars(self.metrics_file, first, last, most)

    def samples(self, step: int | None) -> Json:
        """Return the stored answers of an iteration, group by group, long texts cut; ``{}`` if none is stored."""
        iteration = self.samples_file.iteration(step)
        if iteration is None:
            return {}
        return {
            "step": iteration.step,
            "first": iteration.first,
            "last": iteration.last,
            "previous": iteration.previous,
            "next": iteration.next,
            "groups": grouped(iteration.rows),
        }

    def sample(self, step: int, index: int) -> Json:
        """Return one stored answer with its tokens and its ledger.

        Raises:
            ValueError: There is no such sample.
        """
        iteration = self.samples_file.iteration(step)
        if iteration is None or iteration.step != step or not 0 <= index < len(iteration.rows):
            raise ValueError(f"step {step}, sample {index}: no such sample is stored")
        return self.detail(iteration.rows, index)

    def detail(self, rows: Sequence[Row], index: int) -> Json:
        """Return the data that the page shows of ``rows[index]``; ``rows`` are all of its iteration."""
        row = rows[index]
        return {
            **{name: row.get(name) for name in ("prompt", "response", "reward", "reward_parts", "status")},
            "label": _text(row.get("label")),
            **{name: row.get(name) for name in ("group", "trajectory", "train_step", "advantage")},
            "step": row["rollout_id"],
            "index": index,
            "share": share(row),
            "tokens": row.get("tokens") or [],
            "columns": {n: [_short(v) for v in values] for n, values in token_columns(row).items()},
            "ledger": ledger(row, self.header.settings, rows),
        }

    def search(self, text: str, cursor: int) -> Json:
        """Return some stored answers with ``text`` in prompt, response or label, and where to continue."""
        page = self.samples_file.search(text, cursor)
        hits = [{"step": hit.step, **_card(hit.row, hit.index), "prompt": hit.row.get("prompt")} for hit in page.hits]
        return {"hits": hits, "cursor": page.cursor, "searched": page.searched}


def grouped(rows: Sequence[Row], whole: Sequence[Row] = ()) -> list[Json]:
    """Return the groups of an iteration's rows, in order.

    Args:
        rows: The answers.
        whole: All answers of the iteration, if ``rows`` are different ones among them: how often each was given, the
            mean reward and the size of each group are then counted there.
    """
    groups: dict[Any, Json] = {}
    counts = Counter((_group(row), _answer(row)) for row in whole)
    for index, row in enumerate(rows):
        empty: Json = {
            "group": row.get("group"),
            "prompt": row["prompt"],
            "label": _text(row.get("label")),
            "samples": [],
        }
        if images := _thumbnails(row):
            empty["images"] = images
        count = {"count": counts[_group(row), _answer(row)]} if whole else {}
        groups.setdefault(_group(row), empty)["samples"].append(_card(row, index) | count)
    if whole:
        for key, group in groups.items():
            every = [row for row in whole if _group(row) == key]
            rewards = [row["reward"] for row in every if row.get("reward") is not None]
            group["size"] = len(every)
            group["mean"] = _short(fmean(rewards)) if rewards else None
    return list(groups.values())


def _thumbnails(row: Row) -> list[str]:
    """Return the thumbnails of a row that the page may show: few and small ones, whatever the file holds."""
    images = row.get("images")
    texts = [each for each in images if isinstance(each, str)] if isinstance(images, list) else []
    return [each for each in texts[:MOST_IMAGES] if _THUMBNAIL.fullmatch(each)]


def _card(row: Row, index: int) -> Json:
    response = str(row["response"])
    return {
        "index": index,
        "response": response[:SHORT_TEXT],
        "cut": len(response) > SHORT_TEXT,
        "reward": row.get("reward"),
        "reward_parts": row.get("reward_parts"),
        "status": row.get("status"),
        "recorded": is_recorded(row),
        "trajectory": row.get("trajectory"),
        "advantage": row.get("advantage"),
        "length": len(row.get("tokens") or []) or None,
    }


def settings_table(header: RunHeader) -> list[Json]:
    """Return the settings by section: name, value, and the default if that differs, else None."""
    defaults = public("settings", header.defaults)
    return [
        {
            "section": section,
            "rows": [
                [
                    name,
                    setting_text(value),
                    None if header.is_default(section, name) else setting_text(defaults[section][name]),
                ]
                for name, value in fields.items()
            ],
        }
        for section, fields in header.public_settings().items()
    ]


def setting_text(value: Any) -> str:
    """Return the value of a setting as the pages show it."""
    return "–" if value is None else str(value)


def _text(label: Any) -> str | None:
    """Return a reference answer as text, whatever the data set has for it."""
    return label if label is None or isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


# report.html: the page of a run in one file, with all curves and verdicts and a bounded number of samples.


MOST_BYTES = 20_000_000
MOST_SAMPLES = 2000
MOST_POINTS_IN_FILE = 2000
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
    return write_page(RunView(folder), samples_per_iteration, path)


def write_page(view: RunView, samples_per_iteration: int, path: Path | None = None) -> Path:
    """Write the report of a run that is open, as ``write_report`` does."""
    data = report_data(view, samples_per_iteration)
    target = path or view.folder / REPORT
    save_page(single_file(view.header.title, data), target)
    return target


def save_page(page: bytes, target: Path) -> None:
    """Write a page. Raises ``WriteFailed`` if the disk is full, or cannot be written for another reason."""
    new = target.with_name(f".{target.name}.new")  # renamed into place: a full disk keeps the page that was there
    with naming_disk(target, new):
        if target.exists() and not target.is_file():  # a pipe, for example
            target.write_bytes(page)
            return
        new.write_bytes(page)
        new.replace(target)


def report_data(view: RunView, samples_per_iteration: int) -> dict[str, Any]:
    """Return the data of the page, in at most ``MOST_BYTES``: the curves first, then samples as far as there is room.

    Curves of more than ``MOST_POINTS_IN_FILE`` steps keep the smallest and the largest value of each part.
    """
    overview = view.overview()
    names = [name for name in view.metrics_file.names if not name.startswith("time/")]
    data: dict[str, Any] = {
        "overview": overview,
        "metrics": view.metrics(names, None, None, MOST_POINTS_IN_FILE),
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
    selection = _iterations(view, MOST_SAMPLES // per_iteration) if per_iteration else []
    iterations: dict[str, Any] = {}
    details: dict[str, Any] = {}
    tokens: list[tuple[str, dict[str, Any]]] = []
    share = room / max(len(selection), 1)  # of the bytes, so that no long iteration takes the bytes of later ones
    left = 0.0
    for iteration in selection:
        left += share
        rows: list[Row] = []
        for index in _chosen(iteration.rows, per_iteration):
            whole = view.detail(iteration.rows, index) | {"index": len(rows)}
            short = whole | {"tokens": [], "columns": {}}
            size = len(json_in_html([short, grouped([iteration.rows[index]])]))
            if size <= left:
                left -= size
                key = f"{iteration.step}/{len(rows)}"
                details[key] = short
                rows.append(iteration.rows[index])
                if whole["tokens"]:
                    tokens.append((key, {name: whole[name] for name in ("tokens", "columns")}))
        if rows:
            iterations[str(iteration.step)] = {"step": iteration.step, "groups": grouped(rows, iteration.rows)}
    for position in spread_order(len(tokens)):
        key, columns = tokens[position]
        left -= len(json_in_html(columns))
        if left < 0:
            break
        details[key] |= columns
    return iterations, details


def _chosen(rows: Sequence[Row], count: int) -> list[int]:
    """Return the positions of ``count`` different answers; each group's are together, so that they can be compared.

    Groups and answers with the trainer's values of their tokens come first, then the best and the worst of each group.
    """
    groups: dict[Any, dict[Any, int]] = {}
    for index in sorted(range(len(rows)), key=lambda index: not is_recorded(rows[index])):
        row = rows[index]
        groups.setdefault(_group(row), {}).setdefault(_answer(row), index)
    chosen: list[int] = []
    for positions in groups.values():
        by_reward = sorted(positions.values(), key=lambda index: -(rows[index].get("reward") or 0.0))
        ends = sorted(range(len(by_reward)), key=lambda place: min(place, len(by_reward) - 1 - place))
        different = [by_reward[place] for place in ends]
        chosen += sorted(different, key=lambda index: not is_recorded(rows[index]))
    return sorted(chosen[:count])


def _group(row: Row) -> Any:
    """Return the key that tells the groups of an iteration apart; for rows of earlier versions it is their prompt."""
    return row["prompt"] if row.get("group") is None else row["group"]


def _answer(row: Row) -> tuple[Any, ...]:
    """Return the values that equal answers of a group share."""
    return row["response"], row.get("reward"), row.get("status")


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
