"""Run tests as a part of ``run.sh``: ``run_tests.py RESULTS.xml PYTEST_ARGUMENTS...``.

The exit status is pytest's, or ``SKIPPED`` if it skipped every test; a line ``skipped: REASON`` then states why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

SKIPPED = 77  # as run.sh reads it


@dataclass(frozen=True)
class Result:
    """A test: ``result`` is ok, skipped or FAILED, ``reason`` one line, ``figures`` its recorded figures, as JSON."""

    name: str
    result: str
    seconds: float
    reason: str
    figures: str


def results(path: Path) -> Iterator[Result]:
    """Yield the tests of a file of results."""
    for case in ElementTree.parse(path).iter("testcase"):
        result, reason = "ok", ""
        for kind, named in (("skipped", "skipped"), ("failure", "FAILED"), ("error", "FAILED")):
            for element in case.iter(kind):
                result, reason = named, (element.get("message") or "").partition("\n")[0]
        recorded = [p.get("value", "") for p in case.iter("property") if p.get("name") == "figures"]
        yield Result(case.get("name", ""), result, float(case.get("time", 0)), reason, "".join(recorded))


def main(path: Path, arguments: Sequence[str]) -> int:
    import pytest  # not at the top: the page reads results, also without pytest

    status = int(pytest.main([*arguments, f"--junitxml={path}", "-rs", "-p", "no:cacheprovider"]))
    if status != 0:
        return status
    tests = list(results(path))
    if any(one.result == "ok" for one in tests):
        return 0
    print("skipped:", "; ".join(dict.fromkeys(one.reason for one in tests)))
    return SKIPPED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
