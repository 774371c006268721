"""Faults seeded into the Megatron backend. The comparison with the oracle must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from conformance_checks import Expected, Oracle, conforms
from layouts import RankProcess

from miles.training.megatron.runner import PerTokenScaling

Call = Callable[..., Any]
CONTRACT = "counts tokens"  # Megatron then divides gradients by the tokens that are reported to it
LAYOUTS = ("one", "cp2")  # several micro-batches on a rank; a sample shared by ranks


def _never_counted(call: Call) -> Call:
    def run(scaling: PerTokenScaling, *arguments: Any) -> Any:
        scaling.scored_tokens = 0
        return call(scaling, *arguments)

    return run


def _counted_with_every_micro_batch(call: Call) -> Call:
    def run(scaling: PerTokenScaling, *arguments: Any) -> Any:
        scored = scaling.scored_tokens
        result = call(scaling, *arguments)
        scaling.scored_tokens = scored
        return result

    return run


FAULTS: dict[str, tuple[Any, str, Callable[[Call], Call]]] = {
    "scored tokens are not counted": (PerTokenScaling, "__call__", _never_counted),
    "scored tokens are counted twice": (PerTokenScaling, "__call__", _counted_with_every_micro_batch),
}


def faults_are_found(process: RankProcess, expected: list[Expected]) -> str:
    """The cases conform without a fault and fail with each."""
    assert conforms(process, "untied", CONTRACT, expected) == "", "without a fault the cases conform"
    said = []
    for fault, (owner, name, wrap) in FAULTS.items():
        with patch.object(owner, name, wrap(getattr(owner, name))):
            if "gradient of" not in conforms(process, "untied", CONTRACT, expected):
                said.append(f"not found: {fault}")
    return ", ".join(said)


def checks_of(name: str, oracle: Oracle, whole: bool) -> dict[str, Callable[[RankProcess], str]]:
    """Return the check of the layout ``name``, on the cases with samples that are only scored; by turns on two."""
    if name not in LAYOUTS:
        return {}
    scored = [draft for draft in oracle.drafts("untied") if draft.case.equal_rewards]
    assert scored
    expected = [oracle.expected("untied", draft) for draft in scored[: None if whole else 2]]
    return {"faults are found": partial(faults_are_found, expected=expected)}
