"""Check which releases of megatron-core are accepted. The other files here test training on them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from miles.training.megatron import versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    versions.megatron_version.cache_clear()
    yield monkeypatch
    versions.megatron_version.cache_clear()


def _is(release: str, installed: pytest.MonkeyPatch) -> tuple[int, ...]:
    installed.setattr(versions, "version", lambda _name: release)
    return versions.megatron_version()


@pytest.mark.parametrize(
    ("release", "numbers"),
    [("0.16.1", (0, 16, 1)), ("0.17.0rc2", (0, 17, 0)), ("0.18.dev3+local", (0, 18)), ("0.19.2", (0, 19, 2))],
)
def test_tested_releases_are_accepted_without_a_warning(installed, caplog, release, numbers):
    assert _is(release, installed) == numbers
    assert not caplog.records


def test_a_later_release_is_accepted_with_a_warning(installed, caplog):
    with caplog.at_level(logging.WARNING):
        assert _is("0.20.0", installed) == (0, 20, 0)
    assert "0.20.0 has not been tested" in caplog.text and "--loss-canary" in caplog.text


@pytest.mark.parametrize("release", ["0.15.3", "0.21.0", "1.0"])
def test_other_releases_are_refused(installed, release):
    with pytest.raises(ValueError, match=f"megatron-core {release} is installed.*0.16 up to 0.21.*miles.megatron."):
        _is(release, installed)
