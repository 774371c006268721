"""Hooks of MkDocs: make pages and tables from the code and from measurements, and check pages for network loads.

Three pages exist only in the built site: ``flags.md``, ``objectives.md`` and ``launch-scripts.md``. A line
``<!-- table: NAME -->`` of any page becomes the table of that name, and each lesson gets
a notebook. A warning fails ``mkdocs build --strict``.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"^<!-- table: (.+) -->$", re.MULTILINE)
LESSONS = "tutorials/"
PAGES = {
    "flags.md": ("scripts.pages.flags", "flags_reference"),
    "objectives.md": ("scripts.pages.objectives", "objectives_reference"),
    "launch-scripts.md": ("scripts.pages.launch_scripts", "launch_page"),
}

# Elements that a browser loads on their own. A link that a reader follows may lead anywhere.
LOADS = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "script": "src",
    "source": "src",
    "video": "src",
}
LOADING_LINKS = {"icon", "modulepreload", "preconnect", "preload", "stylesheet"}

log = logging.getLogger("mkdocs.hooks.miles")


def _module(name: str, folder: str = "") -> ModuleType:
    """Import a module of this checkout, or a script of ``folder``, which may import its neighbors."""
    for path in (ROOT / folder, ROOT):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    return importlib.import_module(name)


def _recipes() -> str:
    curves = _module("curves", "examples/tasks")
    return curves.page_block(curves.recipes())


def _reproductions() -> str:
    results = _module("reproduction_results", "examples/reproduce")
    return results.page(list(results.REPRODUCTIONS))


def _kill_campaign() -> str:
    trials = (ROOT / "tests/kill_campaign/results.jsonl").read_text(encoding="utf-8").splitlines()
    tables = _module("tests.kill_campaign.campaign").tables([json.loads(line) for line in trials])
    return f"{len(trials):,} trials:\n\n{tables}"


def _record(name: str) -> str:
    records = _module("records", "benchmarks")
    return records.TABLES[name](records.read_records())


TABLES: dict[str, Callable[[], str]] = {
    "rewards": lambda: _module("scripts.pages.rewards").rewards_table(),
    "recipes": _recipes,
    "reproductions": _reproductions,
    "kill campaign": _kill_campaign,
    "functions of yours": lambda: _module("scripts.pages.launch_scripts").functions_table(),
    "layouts": lambda: (ROOT / "tests/fast/training/megatron/layouts.md").read_text(encoding="utf-8"),
}


@cache
def table(name: str) -> str:
    """Return a table by its name in a page: one of ``TABLES``, or one of benchmarks/records.py."""
    return TABLES[name]() if name in TABLES else _record(name)


@cache
def page(name: str) -> str:
    """Return the text of a page that is made from the code."""
    module, function = PAGES[name]
    return getattr(_module(module), function)()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code, and the notebooks of lessons, for MkDocs."""
    from mkdocs.structure.files import File

    for name in PAGES:
        files.append(File.generated(config, name, content=page(name)))
    for lesson in [file for file in files if file.src_uri.startswith(LESSONS)]:
        made = _module("scripts.notebooks").notebook(lesson.content_string)
        files.append(File.generated(config, _notebook(lesson.src_uri), content=made))
    return files


def _notebook(lesson: str) -> str:
    return lesson.removesuffix(".md") + ".ipynb"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the tables of a page, and link the notebook of a lesson, for MkDocs."""
    if page.file.src_uri.startswith(LESSONS):
        name = _notebook(page.file.src_uri).removeprefix(LESSONS)
        markdown = markdown.replace("\n\n", f"\n\n[This lesson as a notebook]({name})\n\n", 1)
    return TABLE.sub(lambda match: table(match[1]).strip(), markdown)


class _Loaded(HTMLParser):
    """Collect the addresses on other hosts that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(LOADS.get(tag, "")) or ""
        if tag == "link" and LOADING_LINKS & {*(values.get("rel") or "").split()}:
            address = values.get("href") or ""
        if address.startswith(("http:", "https:", "//")):
            self.found.append(address)


def loaded_from_network(html: str) -> list[str]:
    """Return the addresses on other hosts that a browser loads to show this page."""
    parser = _Loaded()
    parser.feed(html)
    return parser.found


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warn of the addresses that a page would load, for MkDocs."""
    for address in loaded_from_network(output):
        log.warning("%s loads %s from the network; ship it in docs/", page.file.src_uri, address)
    return output
