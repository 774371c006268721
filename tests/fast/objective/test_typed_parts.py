"""A part sees its own dataclass's flags: mypy knows their names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# A flag that each of these parts reads, misspelt.
PLANTED = {
    "miles/objective/estimators/grpo.py": ("flags.disable_rewards_normalization", "disable_rewards_normalisation"),
    "miles/objective/policy_losses/cispo.py": ("flags.ratio_max", "ratio_maximum"),
    "miles/tasks/rewards/built_in/ifeval.py": ("flags.ifeval_loose", "ifeval_lose"),
}


@pytest.mark.slow
def test_a_misspelt_flag_in_a_part_is_found_by_mypy(tmp_path):
    shadows = []
    for number, (path, (flag, misspelt)) in enumerate(PLANTED.items()):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert flag in source, f"{path} reads it no more: plant another"
        (tmp_path / f"{number}.py").write_text(source.replace(flag, f"flags.{misspelt}", 1), encoding="utf-8")
        shadows += ["--shadow-file", path, str(tmp_path / f"{number}.py")]
    command = [sys.executable, "-m", "mypy", *shadows, "--cache-dir", str(tmp_path / "cache"), *PLANTED]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    for path, (_, misspelt) in PLANTED.items():
        assert re.search(rf'{path}:\d+: error: "\w+" has no attribute "{misspelt}"', output), output
