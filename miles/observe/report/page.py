"""The page: one set of files, either served or put together into a single file that needs no network."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path
from typing import Any

from miles.observe.report.metrics_file import to_json

STATIC = Path(__file__).with_name("static")
STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "source.js", "charts.js", "tokens.js", "samples.js", "page.js")


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
