"""bf16 products on every CPU, also on one that reports AMX and hides its tiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.base import host
from miles.base.host import avoid_unusable_amx, lacks_tile_palettes

LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
BF16_PRODUCT = """
import miles.types.sample, torch
matrix = torch.eye(64, dtype=torch.bfloat16)
assert torch.equal(matrix @ matrix, matrix)
"""


@pytest.fixture
def cpu_with_amx(tmp_path: Path) -> str:
    """The file of a CPU with AMX."""
    if os.uname().machine != "x86_64":
        pytest.skip("AMX is of x86-64 only")
    file = tmp_path / "cpuinfo"
    file.write_text("flags : fpu avx512_bf16 amx_bf16 amx_tile\n")
    return str(file)


def test_a_process_that_imports_miles_computes_bf16_products() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS}
    done = subprocess.run([sys.executable, "-c", BF16_PRODUCT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("leaves", "lacks"),
    [({0: 0x1C, 0x1D: 7}, True), ({0: 0x20, 0x1D: 0}, True), ({0: 0x20, 0x1D: 1}, False)],
    ids=["the leaf is missing", "no palette", "a palette"],
)
def test_amx_needs_a_palette(
    cpu_with_amx: str, monkeypatch: pytest.MonkeyPatch, leaves: dict[int, int], lacks: bool
) -> None:
    monkeypatch.setattr(host, "_cpuid", leaves.__getitem__)
    assert lacks_tile_palettes(cpu_with_amx) == lacks


def test_a_cpu_without_amx_lacks_nothing(cpu_with_amx: str) -> None:
    Path(cpu_with_amx).write_text("flags : fpu avx512_bf16\n")
    assert not lacks_tile_palettes(cpu_with_amx)
    assert not lacks_tile_palettes(cpu_with_amx + " that does not exist")


def test_the_cpu_answers(cpu_with_amx: str) -> None:
    """The lowest leaf gives the highest, which every x86-64 CPU has above 1."""
    assert 1 < host._cpuid(0) < 0x1000


@pytest.mark.parametrize(
    ("variables", "then"),
    [({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}), *(({name: "AVX2"}, {name: "AVX2"}) for name in LIMITS)],
    ids=["none", *LIMITS],
)
def test_onednn_is_limited_unless_a_limit_is_given(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], then: dict[str, str]
) -> None:
    monkeypatch.setattr(host, "lacks_tile_palettes", lambda: True)
    environment = dict(variables)
    monkeypatch.setattr(os, "environ", environment)
    avoid_unusable_amx()
    assert environment == then
