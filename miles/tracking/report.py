"""The run report, one self-contained page: ``python -m miles.tracking.report OUTPUT_DIR`` makes it again."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from miles.tracking.report_curves import Row, charts, headline
from miles.tracking.report_style import SCRIPT, STYLE
from miles.tracking.run_files import REPORT, RunFiles, SampleRecord
from miles.tracking.run_header import RunHeader

MAX_ROLLOUTS_SHOWN = 12


def write_report(
    output_dir: Path, header: RunHeader, rows: Sequence[Row], samples: Mapping[int, Sequence[SampleRecord]]
) -> Path:
    """Write ``report.html`` and return its path.

    ``rows`` has one mapping per step with ``step`` in it (``RunFiles.read_metrics``), ``samples`` the sampled answers
    by step. The page loads nothing from outside, and everything that a model or a user wrote is escaped.
    """
    path = output_dir / REPORT
    # A lone surrogate, which UTF-8 cannot hold, becomes a character reference.
    path.write_text(render(header, rows, samples), encoding="utf-8", errors="xmlcharrefreplace")
    return path


def render(header: RunHeader, rows: Sequence[Row], samples: Mapping[int, Sequence[SampleRecord]]) -> str:
    """Return the page as text."""
    curves = charts(rows) or "<p>No step has finished yet.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(header.title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(header.title)}</h1><button>light / dark</button></header>"
        f'<p class="objective">{escape(header.objective_words)}</p>'
        f'<pre class="formula">{escape(header.objective_formula)}</pre>'
        f"{_tiles(rows)}<h2>Curves<small>faint: each step, bold: moving mean</small></h2>"
        f'<div class="grid-of-charts">{curves}</div>'
        f"{_answers(samples)}{_settings(header)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _tiles(rows: Sequence[Row]) -> str:
    tiles = (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(beside)}</small></div>'
        for label, value, beside in headline(rows)
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _spread(rollouts: Sequence[int]) -> list[int]:
    """At most ``MAX_ROLLOUTS_SHOWN`` rollouts, first and last among them."""
    if len(rollouts) <= MAX_ROLLOUTS_SHOWN:
        return list(rollouts)
    gaps = MAX_ROLLOUTS_SHOWN - 1
    return [rollouts[i * (len(rollouts) - 1) // gaps] for i in range(MAX_ROLLOUTS_SHOWN)]


def _answers(samples: Mapping[int, Sequence[SampleRecord]]) -> str:
    """Return the sampled answers of some rollouts; first and last are open."""
    shown = _spread(sorted(samples))
    if not shown:
        return ""
    blocks = []
    for rollout in shown:
        opened = " open" if rollout in (shown[0], shown[-1]) else ""
        answers = samples[rollout]
        rewards = [s.reward for s in answers if s.reward is not None and math.isfinite(s.reward)]
        mean = f"mean reward of these {len(rewards)}: {sum(rewards) / len(rewards):.3g}" if rewards else ""
        blocks.append(
            f"<details{opened}><summary>rollout {rollout}<small>{mean}</small></summary>"
            f'<div class="answers">{"".join(map(_answer, answers))}</div></details>'
        )
    return f"<h2>Sampled answers</h2>{''.join(blocks)}"


def _answer(sample: SampleRecord) -> str:
    reward = "none" if sample.reward is None else f"{sample.reward:.3g}"
    colour = "good" if sample.reward is not None and sample.reward > 0 else "bad"
    label = "" if sample.label is None else f" · reference <code>{escape(str(sample.label))}</code>"
    return (
        f'<div class="answer"><h3>prompt</h3><pre>{escape(sample.prompt)}</pre>'
        f"<h3>response</h3><pre>{escape(sample.response)}</pre>"
        f'<footer>reward <b class="{colour}">{reward}</b>{label} · {escape(str(sample.status))}</footer></div>'
    )


def _settings(header: RunHeader) -> str:
    """Return one table per section; settings that differ from the default are marked, other sections folded."""
    tables = []
    for section, fields in header.public_settings().items():
        css = {name: "default" if header.is_default(section, name) else "set" for name in fields}
        changed = sum(kind == "set" for kind in css.values())
        rows = "".join(
            f'<tr class="{css[name]}"><td>{escape(name)}</td><td>{escape(_shown(value))}</td></tr>'
            for name, value in fields.items()
        )
        note = f"{changed} of {len(fields)} differ from the default" if header.defaults else ""
        opened = " open" if changed or not header.defaults else ""
        tables.append(
            f"<details{opened}><summary>{escape(section)}<small>{note}</small></summary><table>{rows}</table></details>"
        )
    return f'<h2>Settings</h2><div class="sections">{"".join(tables)}</div>'


def _shown(value: Any) -> str:
    return "–" if value is None else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the report of a finished, killed or still running run again."""
    parser = argparse.ArgumentParser(prog="python -m miles.tracking.report", description=main.__doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the --output-dir of the run")
    output_dir = parser.parse_args(arguments).output_dir
    try:
        header, files = RunHeader.load(output_dir), RunFiles(output_dir)
        print(write_report(output_dir, header, files.read_metrics(), files.read_samples()))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
