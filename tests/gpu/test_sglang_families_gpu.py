"""Test one SGLang server on one GPU with each family: its log-probs, before and after an update, and stop texts.

Written against the source of SGLang 0.5.23. ``engine_checks.py`` has the comparison and its bounds.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from miles.models.reading import READ_AS
from tests.gpu.engine_checks import BOUND
from tests.gpu.sglang_engine import DETERMINISTIC
from tests.gpu.tiny_families import DENSE, FAMILIES, served_architectures

SECONDS = 180  # of one server, with the compilation of its kernels


def class_of(kind: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.for_model(READ_AS.get(kind, kind))
    return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)


@pytest.mark.timeout(SECONDS)
def test_a_response_ends_at_a_text(run_program: Any, record_property: Any) -> None:
    report = run_program("sglang_engine.py", "stop")
    record_property(
        "figures", json.dumps({"tokens": len(report["ended"]["tokens"]), "reason": report["ended"]["reason"]})
    )


@pytest.mark.timeout(SECONDS)
def test_log_probs_in_deterministic_mode(run_program: Any, record_property: Any) -> None:
    record_property("figures", json.dumps(run_program("sglang_engine.py", DETERMINISTIC)))


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("kind", [DENSE, *FAMILIES])
def test_log_probs_are_those_of_the_weights(kind: str, run_program: Any, record_property: Any) -> None:
    if class_of(kind) not in served_architectures():
        pytest.skip(f"the installed SGLang has no {class_of(kind)}")
    report = run_program("sglang_engine.py", kind)
    record_property("figures", json.dumps(report))
    print(f"\n{kind}: {report} (bound {BOUND})")
