"""A hook of MkDocs: warn of a page that loads something from the network, so that ``mkdocs build --strict`` fails."""

from __future__ import annotations

import logging
from html.parser import HTMLParser
from typing import Any

# Elements that a browser loads by themselves. A link that a reader follows may lead anywhere.
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

log = logging.getLogger("mkdocs.hooks.network")


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
    """Warn of what a page would load, for MkDocs."""
    for address in loaded_from_network(output):
        log.warning("%s loads %s from the network; ship it in docs/", page.file.src_uri, address)
    return output
