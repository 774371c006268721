"""A run folder as the page asks for it: every answer is a small piece of JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.observe.report.figures import charts, tiles
from miles.observe.report.health import verdicts
from miles.observe.report.ledger import is_recorded, ledger, share, token_columns
from miles.observe.report.metrics_file import MetricsFile
from miles.observe.report.phases import phase_bars
from miles.observe.tracking.run_files import METRICS, SAMPLES
from miles.observe.tracking.run_header import RunHeader
from miles.observe.tracking.sample_file import Row, SampleFile

MOST_POINTS = 1500
MOST_BARS = 200
SHORT_TEXT = 2000  # characters of an answer in the list of an iteration

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
        return f"{self.metrics_file.revision}-{samples.stat().st_size if samples.is_file() else 0}"

    def overview(self, since: str = "") -> Json:
        """Return what the page shows at once; only ``{"revision": …}`` if nothing has changed ``since``."""
        with self._lock:
            self.metrics_file.refresh()
            revision = self.revision
            if since == revision:
                return {"revision": revision}
            self.header = RunHeader.load(self.folder)  # a new run in the same folder has another one
            header, metrics = self.header, self.metrics_file
            return {
                "revision": revision,
                "title": header.title,
                "folder": self.folder.resolve().name,
                "words": header.objective_words,
                "formula": header.objective_formula,
                "total_steps": header.total_steps,
                "steps": [metrics.steps[0], metrics.steps[-1]] if metrics.steps else None,
                "tiles": tiles(metrics),
                "charts": charts(metrics.names),
                "verdicts": [verdict.to_json() for verdict in verdicts(metrics)],
                "settings": settings_table(header),
            }

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
        """Return what the page shows of ``rows[index]``; ``rows`` are all of its iteration."""
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


def grouped(rows: Sequence[Row]) -> list[Json]:
    """Return the groups of an iteration's rows, in order; rows of earlier versions are grouped by their prompt."""
    groups: dict[Any, Json] = {}
    for index, row in enumerate(rows):
        key = row["prompt"] if row.get("group") is None else row["group"]
        empty = {"group": row.get("group"), "prompt": row["prompt"], "label": _text(row.get("label")), "samples": []}
        groups.setdefault(key, empty)["samples"].append(_card(row, index))
    return list(groups.values())


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
    """Return the settings by section: name, value, and whether it differs from the default."""
    return [
        {
            "section": section,
            "rows": [[name, _shown(value), not header.is_default(section, name)] for name, value in fields.items()],
        }
        for section, fields in header.public_settings().items()
    ]


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)


def _text(label: Any) -> str | None:
    """Return a reference answer as text, whatever the data set has for it."""
    return label if label is None or isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
