"""One picture of several seeds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from miles.observe.run_files import RunFiles
from scripts.curves import Series, main, mean_series


def test_the_mean_skips_steps_that_a_run_lacks() -> None:
    mean = mean_series([Series("a", [0, 1, 2], [0.0, math.nan, 2.0]), Series("b", [0, 1, 2], [1.0, 1.0, 4.0])])
    assert (list(mean.xs), list(mean.ys)) == ([0, 2], [0.5, 3.0])


def test_a_png_is_drawn_for_several_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for seed in (1, 2):
        (tmp_path / f"seed{seed}").mkdir()
        RunFiles(tmp_path / f"seed{seed}").append_metrics(0, {"rollout/reward": 0.5, "eval/unseen/accuracy": 0.3})
    out = tmp_path / "curve.png"
    main([str(tmp_path / "seed1"), str(tmp_path / "seed2"), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err
