"""``train.py`` reports wrong flags at once, before it imports Ray or torch."""

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]


def test_wrong_flags_exit_2():
    """The batch is checked last."""
    flags = (
        "--hf-checkpoint m --prompt-data reasoning_gym:gcd --rm-type length --rollout-batch-size 4 "
        "--n-samples-per-prompt 4 --rollout-max-response-len 8 --num-rollout 1 --global-batch-size 5"
    )
    script = "import sys, runpy; sys.argv[0] = 'train.py'\ntry:\n    runpy.run_path('train.py', run_name='__main__')\n"
    script += "finally:\n    assert not {'ray', 'torch'} & sys.modules.keys()"
    command = [sys.executable, "-c", script, *flags.split()]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--global-batch-size 5" in ended.stderr
    assert "Traceback" not in ended.stderr
