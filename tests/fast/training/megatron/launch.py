"""Run the checks of layouts on real ranks over gloo: ``python launch.py FOLDER {whole,by_turns} [LAYOUT...]``.

``whole``: every comparison under both contracts with Megatron; ``by_turns``: each under one of them.

FOLDER/results.json gets the failures by layout and check, FOLDER/measured.json the distances from the oracle. The ranks
are forked from one process that has imported everything and computed the oracle, because both take much longer than the
checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from miles.training.megatron.cpu_support import support_cpu

support_cpu()
sys.path.insert(0, str(Path(__file__).parent / "optimizer"))

import auxiliary_checks  # noqa: E402  # Megatron is imported from here on
import conformance_checks  # noqa: E402
import critic_checks  # noqa: E402
import fault_checks  # noqa: E402
import host_memory_checks  # noqa: E402
import offload_checks  # noqa: E402
import state_checks  # noqa: E402
from forked_ranks import Check, run_on_ranks  # noqa: E402
from layouts import LAYOUTS, MEASURED, RankProcess, save_models  # noqa: E402

from tests.fast.training.megatron.model import reference_checks  # noqa: E402


def checks_of(
    name: str,
    expected: dict[str, list[conformance_checks.Expected]],
    of_critic: critic_checks.Expectations,
    auxiliary: auxiliary_checks.Oracle,
    contracts: conformance_checks.Contracts,
) -> dict[str, Check]:
    """Return every check of the layout ``name``. A check raises, or returns what is wrong."""
    found: dict[str, Check] = {}
    for module in (state_checks, offload_checks, host_memory_checks, reference_checks):
        found |= {check.__name__: check for check in module.OF_LAYOUT.get(name, ())}
    for model in LAYOUTS[name].models:
        for contract in contracts.of(model):
            cases = conformance_checks.cases_of(name, contract, expected[model])
            found[f"{model}, {contract}"] = partial(
                conformance_checks.conforms, model=model, contract=contract, expected=cases
            )
    found |= fault_checks.checks_of(name, expected)
    found |= critic_checks.checks_of(name, of_critic, contracts)
    return found | auxiliary_checks.checks_of(name, auxiliary, contracts)


def run_layout(
    folder: Path, name: str, checks: dict[str, Check], together: Callable[[list[str]], str] = "".join
) -> dict[str, str]:
    """Return the failures of each check, empty if all ranks pass: the ranks' messages, combined by ``together``."""
    processes = [RankProcess(folder, name, rank) for rank in range(LAYOUTS[name].ranks)]
    return run_on_ranks(folder, name, processes, checks, together, at_the_end=_write_measured)


def _write_measured(process: RankProcess) -> None:
    (process.folder / f"{process.name} {process.rank} measured.json").write_text(json.dumps(MEASURED))


def main(folder: Path, whole: bool, names: list[str]) -> None:
    save_models(folder)
    auxiliary_checks.save_models(folder)
    expected = conformance_checks.expectations(folder, names or LAYOUTS)
    state_checks.compute_once(folder, names or LAYOUTS)
    of_critic = critic_checks.expectations(folder)
    auxiliary = auxiliary_checks.Oracle(folder)
    contracts = conformance_checks.Contracts(whole)
    results = {
        name: run_layout(folder, name, checks_of(name, expected, of_critic, auxiliary, contracts))
        for name in names or LAYOUTS
    }
    (folder / "results.json").write_text(json.dumps(results))
    files = {name: folder / f"{name} 0 measured.json" for name in results}
    measured = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    (folder / "measured.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "whole", sys.argv[3:])
