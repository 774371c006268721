"""Low-rank adapters of the Megatron backend on real ranks over gloo; the checks are in adapter_checks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_scripts import run_checks

SECONDS = 900.0
QUICK = ("one, sigmoid",)
SLOW = (
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
LAYOUTS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected = {item.callspec.params.get("layout") for item in items}
    names = [name for name in (*QUICK, *SLOW) if name in selected]
    folder: Any = tmp_path_factory.mktemp("megatron-adapters")
    return run_checks(Path(__file__).with_name("launch_adapters.py"), folder, *names, seconds=SECONDS)


def _failures(checks: dict[str, str]) -> str:
    return "\n\n".join(f"{check}\n{failure}" for check, failure in checks.items() if failure)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_is_that_of_peft(results: dict[str, dict[str, str]], layout: str) -> None:
    """Log-probs, gradients under both contracts, exports, frozen weights and resumed steps, on every layout."""
    assert len(results[layout]) >= 5
    assert not _failures(results[layout])


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("layout", QUICK)
def test_a_checkpoint_is_read_on_one_rank(results: dict[str, dict[str, str]], layout: str) -> None:
    """There, layers that cannot have an adapter are refused too."""
    assert layout in results and not _failures(results["read on one rank"])
