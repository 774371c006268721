"""JUnit XML, where CI services show the results of checks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

# What XML 1.0 cannot hold, also not as an escape.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class CheckResult:
    """One check. ``fault`` describes the failure, in one line; None if it passed."""

    name: str
    seconds: float
    fault: str | None = None
    details: str = ""


def write_junit(path: Path, suite: str, results: Sequence[CheckResult]) -> None:
    """Write the results as one test suite. Folders are created if missing."""
    failed = sum(result.fault is not None for result in results)
    counts = {"tests": str(len(results)), "failures": str(failed), "errors": "0", "skipped": "0"}
    seconds = f"{sum(result.seconds for result in results):.3f}"
    root = ElementTree.Element("testsuites", {"name": "miles", **counts, "time": seconds})
    parent = ElementTree.SubElement(root, "testsuite", {"name": suite, **counts, "time": seconds})
    for result in results:
        about = {"classname": suite, "name": _text(result.name), "time": f"{result.seconds:.3f}"}
        case = ElementTree.SubElement(parent, "testcase", about)
        if result.fault is not None:
            failure = ElementTree.SubElement(case, "failure", {"message": _text(result.fault)})
            failure.text = _text(result.details or result.fault)
    ElementTree.indent(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _text(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
