"""Run checks on real ranks over gloo: ``python launch.py FOLDER {whole,by_turns} [PART...]``; by default all layouts.

A part is a layout (layouts.py), ``checkpoints`` (checkpoint_checks.py) or ``adapters of LAYOUT`` (adapter_checks.py).

``whole``: every check in every layout that lists it, and every comparison under both contracts with Megatron.
``by_turns``: every check in at least one layout, and each comparison under one contract, on half of its cases.

FOLDER/results.json gets the failures by group of ranks and check, FOLDER/measured.json the distances from the oracle.
The ranks are forked from one process that has imported everything and computed the oracle, because both take much
longer than the checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from miles.run.cpu_tuning import importing
from miles.training.megatron.cpu_support import support_cpu

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("optimizer", "adapter", "model")]

with importing():
    support_cpu()  # Megatron is imported from here on
    import auxiliary_checks
    import conformance_checks
    import critic_checks
    import fault_checks
    import host_memory_checks
    import offload_checks
    import reference_checks
    import state_checks
    from forked_ranks import Check, run_on_ranks
    from layouts import LAYOUTS, MEASURED, RankProcess, save_models

ADAPTERS = "adapters of "


def checks_of(
    name: str,
    oracle: conformance_checks.Oracle,
    of_critic: critic_checks.Expectations,
    auxiliary: auxiliary_checks.Oracle,
    contracts: conformance_checks.Contracts,
) -> dict[str, Check]:
    """Return every check of the layout ``name``. A check raises, or returns a fault in words."""
    checks: dict[str, Check] = {}
    for module in (state_checks, offload_checks, host_memory_checks, reference_checks):
        of_layout = module.OF_LAYOUT if contracts.whole else module.BY_TURNS
        checks |= {check.__name__: check for check in of_layout.get(name, ())}
    for model in LAYOUTS[name].models:
        for contract in contracts.of(model):
            drafts = contracts.cases(model, name, oracle.drafts(model), contract)
            expected = [oracle.expected(model, draft) for draft in drafts]
            checks[f"{model}, {contract}"] = partial(
                conformance_checks.conforms, model=model, contract=contract, expected=expected
            )
    checks |= fault_checks.checks_of(name, oracle, contracts.whole)
    checks |= critic_checks.checks_of(name, of_critic, contracts)
    return checks | auxiliary_checks.checks_of(name, auxiliary, contracts)


def run_layout(
    folder: Path,
    name: str,
    checks: dict[str, Check],
    together: Callable[[list[str]], str] = "".join,
    whole: bool = True,
) -> dict[str, str]:
    """Return the failures of each check, empty if all ranks pass: the ranks' messages, combined by ``together``."""
    processes = [RankProcess(folder, name, rank, whole) for rank in range(LAYOUTS[name].ranks)]
    return run_on_ranks(folder, name, processes, checks, together, at_the_end=_write_measured)


def _write_measured(process: RankProcess) -> None:
    (process.folder / f"{process.name} {process.rank} measured.json").write_text(json.dumps(MEASURED))


def run_layouts(folder: Path, whole: bool, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the failures by layout and check."""
    state_checks.compute_once(folder, names, whole)
    oracle = conformance_checks.Oracle(folder)
    of_critic = critic_checks.expectations(folder, names, whole)
    auxiliary = auxiliary_checks.Oracle(folder)
    contracts = conformance_checks.Contracts(whole)
    checks = {name: checks_of(name, oracle, of_critic, auxiliary, contracts) for name in names}
    results = {name: run_layout(folder, name, checks[name], whole=whole) for name in names}
    files = {name: folder / f"{name} 0 measured.json" for name in results}
    measured = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    (folder / "measured.json").write_text(json.dumps(measured))
    return results


def main(folder: Path, whole: bool, parts: list[str]) -> None:
    layouts = [part for part in parts or LAYOUTS if part in LAYOUTS]
    adapted = [part.removeprefix(ADAPTERS) for part in parts if part.startswith(ADAPTERS)]
    save_models(folder)
    auxiliary_checks.save_models(folder)
    results = run_layouts(folder, whole, layouts) if layouts else {}
    if "checkpoints" in parts:
        import launch_checkpoints

        results |= launch_checkpoints.run(folder, whole)
    if adapted:
        import launch_adapters

        results |= launch_adapters.run(folder, adapted)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "whole", sys.argv[3:])
