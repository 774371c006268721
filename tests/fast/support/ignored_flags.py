"""Take a flag's effect away: a field of the settings then has its default, whatever a test or a command sets.

As a plugin of pytest (``-p tests.fast.support.ignored_flags``) this runs tests again with flags ignored, and writes
down under which of them each test still passes. ``IGNORED_FLAGS`` is a JSON file of ``{test: [field, ...]}``, by node
ids without parameters, ``IGNORED_FLAGS_FOUND`` the file of the results: ``{test: {"": passed, field: passed, ...}}``,
by node ids with them; ``""`` is without an ignored flag.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from miles.config.settings import SECTIONS


class Field:
    """A field of a dataclass; while it is ``ignored``, its value is the default, whatever was or is set."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default
        self.ignored = False

    def __get__(self, owner: Any, cls: type | None = None) -> Any:
        if owner is None or self.ignored:
            return self.default
        return owner.__dict__.get(self.name, self.default)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self.name] = self.default if self.ignored else value


def install() -> dict[str, list[Field]]:
    """Replace every field of the sections, and of the classes that they inherit from; return them by name."""
    fields = dict[str, list[Field]]()
    for section in SECTIONS.values():
        for cls in section.__mro__:
            if not dataclasses.is_dataclass(cls):
                continue
            for field in dataclasses.fields(cls):
                if field.name in cls.__dict__ and not isinstance(cls.__dict__[field.name], Field):
                    one = Field(field.name, field.default)
                    setattr(cls, field.name, one)
                    fields.setdefault(field.name, []).append(one)
    return fields


@contextmanager
def ignoring(fields: list[Field]) -> Iterator[None]:
    """Ignore what the block sets in ``fields``, and what was set in them."""
    for field in fields:
        field.ignored = True
    try:
        yield
    finally:
        for field in fields:
            field.ignored = False


class Plugin:
    """Run each test, then again once for each of its flags."""

    def __init__(self, flags: dict[str, list[str]], found: Path) -> None:
        self.flags, self.found = flags, found
        self.fields = install()
        self.passed = dict[str, dict[str, bool]]()

    def candidates(self, item: pytest.Item) -> list[str]:
        return self.flags.get(item.nodeid.partition("[")[0], [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        found = {"": self._run(item)}
        for name in self.candidates(item) if found[""] else ():
            with ignoring(self.fields[name]):
                found[name] = self._run(item)
        self.passed[item.nodeid] = found
        return True

    def _run(self, item: pytest.Item) -> bool:
        item._initrequest()  # type: ignore[attr-defined]
        # The next item is the same: fixtures of its module and session stay.
        return all(report.passed for report in runtestprotocol(item, nextitem=item, log=False))

    def pytest_sessionfinish(self) -> None:
        self.found.write_text(json.dumps(self.passed))


def pytest_configure(config: pytest.Config) -> None:
    flags = json.loads(Path(os.environ["IGNORED_FLAGS"]).read_text())
    config.pluginmanager.register(Plugin(flags, Path(os.environ["IGNORED_FLAGS_FOUND"])))
