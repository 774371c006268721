"""The Megatron backend on real ranks over gloo, layout by layout (layouts.py), in one process tree (launch.py).

The layouts of ``QUICK`` have every kind of parallelism, padding and the distributed optimizer at least once. Each of
their comparisons is made under one of the contracts with Megatron, by turns. Slow tests make all comparisons in all
layouts under both.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from rank_scripts import run_checks
from tolerance import RELATIVE_ERROR

HERE = Path(__file__).parent
SECONDS = 1500.0  # for all layouts, on a busy machine
QUICK = (
    "one",
    "one, padded",
    "one, sigmoid",
    "dp2, distributed optimizer",
    "tp2 with sp",
    "pp2",
    "cp2",
    "ep2 with cp2",
    "dynamic cp",
)


def _layouts() -> list[str]:
    """Return the keys of ``LAYOUTS``, without importing Megatron."""
    for node in ast.parse((HERE / "layouts.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYOUTS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("layouts.py has no LAYOUTS")


WAYS = ["by_turns", pytest.param("whole", marks=pytest.mark.slow)]
RUNS = [("by_turns", name) for name in QUICK] + [
    pytest.param("whole", name, marks=pytest.mark.slow) for name in _layouts()
]


@dataclass(frozen=True)
class Results:
    """The failures of each check, empty if it holds, and the measurements. Both by layout."""

    said: dict[str, dict[str, str]]
    measured: dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run the checks of all layouts that are selected, by turns or under both contracts."""
    folder = tmp_path_factory.mktemp("megatron")
    ways = [item.callspec.params for item in request.session.items if item.path == request.path]
    selected = {way.get("layout") for way in ways if way["results"] == request.param}
    names = [name for name in _layouts() if name in selected] or list(QUICK)
    said = run_checks(HERE / "launch.py", folder, request.param, *names, seconds=SECONDS)
    return Results(said, json.loads((folder / "measured.json").read_text()))


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("results", WAYS, indirect=True)
@pytest.mark.parametrize("kind", ["seq_aux_loss", "mtp", "mtp and seq_aux_loss"])
def test_losses_inside_the_model_have_the_same_gradient_in_every_layout(results: Results, kind: str) -> None:
    """Without other losses, the gradient's norm is the same in every layout, with the per-token flag on and off.

    Megatron 0.16.1 by itself has 0.0815, 0.1556, 0.0778 and 10.43 in such a table.
    """
    norms = {
        (layout, what): found["norm"]
        for layout, measured in results.measured.items()
        for what, found in measured.items()
        if what.rpartition(", ")[0] == kind
    }
    assert {what.rpartition(", ")[2] for _, what in norms} == {"averages", "counts tokens"}
    assert len(norms) >= 4 and min(norms.values()) > 0.01
    assert max(norms.values()) <= min(norms.values()) * (1 + RELATIVE_ERROR), norms


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("results", "layout"), RUNS, indirect=["results"])
def test_layout(results: Results, layout: str) -> None:
    """Gradients agree with the oracle in every mode. Conversion, optimizer and reference are right, where listed."""
    assert results.said[layout]
    failures = {check: failure for check, failure in results.said[layout].items() if failure}
    assert not failures, "\n\n".join(f"{check}\n{failure}" for check, failure in failures.items())
