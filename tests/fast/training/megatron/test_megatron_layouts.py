"""The Megatron backend on real ranks over gloo, in one process tree (launch.py): layouts, checkpoints and adapters.

The layouts of ``QUICK`` have every kind of parallelism, padding and the distributed optimizer at least once. Among
them, each check runs in at least one, and each comparison is made under one of the contracts with Megatron and on half
of its cases, by turns. Slow tests make all comparisons in all layouts under both.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rank_scripts import run_checks
from tolerance import RELATIVE_ERROR

HERE = Path(__file__).parent
SECONDS = 3300.0  # for all parts, on a busy machine
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
ADAPTED = (  # the first in the fast tests
    "one, sigmoid",
    "tp2 with sp",
    "one",
    "one, recomputed",
    "dp2, distributed optimizer",
    "tp2",
    "pp2",
    "pp3, interleaved",
    "cp2",
    "ep2 with cp2",
    "tp2 with sp, pp2",
    "tp2 with sp, ep2",
    "tp2 with sp, ep2, sigmoid",
)
LAYOUTS_OF_CHECKPOINTS = {
    ("by_turns", "saved"): 6,
    ("by_turns", "resumed"): 6,
    ("whole", "saved"): 12,
    ("whole", "resumed"): 13,
}


def _layouts() -> list[str]:
    """Return the keys of ``LAYOUTS``, without importing Megatron."""
    for node in ast.parse((HERE / "layouts.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYOUTS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("layouts.py has no LAYOUTS")


WAYS = ["by_turns", pytest.param("whole", marks=pytest.mark.slow)]
CHECKPOINTS = "checkpoints"


def _runs(quick: Sequence[str], whole: Sequence[str]) -> list[Any]:
    """Return a way and a part of launch.py for each test: ``quick`` by turns, and ``whole`` in slow tests."""
    return [("by_turns", part) for part in quick] + [
        pytest.param("whole", part, marks=pytest.mark.slow) for part in whole
    ]


@dataclass(frozen=True)
class Results:
    """The failures of each check, empty if it holds, by group of ranks; and the measurements by layout."""

    way: str
    said: dict[str, dict[str, str]]
    measured: dict[str, dict[str, dict[str, float]]]

    def failures(self, *groups: str) -> str:
        """Return the failures of the checks of ``groups``, in words."""
        assert groups and all(self.said[group] for group in groups)
        checks = [(group, check, self.said[group][check]) for group in groups for check in self.said[group]]
        return "\n\n".join(f"{group}: {check}\n{failure}" for group, check, failure in checks if failure)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run the parts that the selected tests name, by turns or whole; the layouts of ``QUICK`` if they name none."""
    folder = tmp_path_factory.mktemp("megatron")
    selected = [item.callspec.params for item in request.session.items if item.path == request.path]
    parts = dict.fromkeys(params.get("part") for params in selected if params["results"] == request.param)
    layouts = [name for name in _layouts() if name in parts] or (QUICK if None in parts else ())
    others = [part for part in parts if part is not None and part not in layouts]
    said = run_checks(HERE / "launch.py", folder, request.param, *layouts, *others, seconds=SECONDS)
    measured = json.loads((folder / "measured.json").read_text()) if layouts else {}
    return Results(request.param, said, measured)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("results", WAYS, indirect=True)
@pytest.mark.parametrize("kind", ["seq_aux_loss", "mtp", "mtp and seq_aux_loss"])
def test_losses_inside_the_model_have_the_same_gradient_in_every_layout(results: Results, kind: str) -> None:
    """Without other losses, the gradient's norm is the same in every layout, with the per-token flag on and off.

    Megatron 0.16.1 on its own has 0.0815, 0.1556, 0.0778 and 10.43 in such a table.
    """
    norms = {
        (layout, what): figures["norm"]
        for layout, measured in results.measured.items()
        for what, figures in measured.items()
        if what.rpartition(", ")[0] == kind
    }
    assert {what.rpartition(", ")[2] for _, what in norms} == {"averages", "counts tokens"}
    assert len(norms) >= 3 and min(norms.values()) > 0.01
    assert max(norms.values()) <= min(norms.values()) * (1 + RELATIVE_ERROR), norms


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("results", "part"), _runs(QUICK, _layouts()), indirect=["results"])
def test_layout(results: Results, part: str) -> None:
    """Gradients agree with the oracle: whole, in every mode. Conversion, optimizer and reference, where listed."""
    assert not results.failures(part)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("results", "part"), _runs([CHECKPOINTS], [CHECKPOINTS]), indirect=["results"])
@pytest.mark.parametrize("done", ["saved", "resumed"])
def test_every_layout_saves_and_resumes_from_others(results: Results, part: str, done: str) -> None:
    groups = [group for group in results.said if group.endswith(f": {done}")]
    assert len(groups) == LAYOUTS_OF_CHECKPOINTS[results.way, done], groups
    assert not results.failures(*groups)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("results", "part"), _runs([CHECKPOINTS], [CHECKPOINTS]), indirect=["results"])
def test_kill_while_saving_leaves_the_last_checkpoint(results: Results, part: str) -> None:
    ends = results.said["killed"]["killed_while_saving"].splitlines()
    assert [end.partition(": ")[0] for end in ends] == [f"rank {rank} of dp2 did not finish" for rank in range(2)]
    assert any(end.endswith(": ended by SIGKILL") for end in ends)
    assert not results.failures("after the kill")


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(
    ("results", "part"),
    _runs([f"adapters of {ADAPTED[0]}"], [f"adapters of {layout}" for layout in ADAPTED]),
    indirect=["results"],
)
def test_an_adapter_is_that_of_peft(results: Results, part: str) -> None:
    """Log-probs, gradients under both contracts, exports, frozen weights and resumed steps, on every layout.

    Its checkpoint is read on one rank, where layers that cannot have an adapter are refused too.
    """
    assert len(results.said[part]) >= 5
    assert not results.failures(part, "adapters read on one rank")
