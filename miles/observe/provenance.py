"""Record the dependencies of a run: versions, git state, checksums of the data, seeds and machine. Part of run.json."""

import hashlib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import miles
from miles.base.host import has_gpu, installed_version, memory_bytes
from miles.config.settings import Settings

PACKAGES = (
    "torch",
    "ray",
    "transformers",
    "numpy",
    "datasets",
    "safetensors",
    "sglang",
    "sglang-router",
    "megatron-core",
)
GIT_SECONDS = 5.0
HASHED_BYTES = 2**30  # of one file of prompts; a larger one has the checksum of its beginning


def provenance(settings: Settings) -> dict[str, Any]:
    """Return plain JSON with the versions, data, seeds and machine that a run starts with now.

    Args:
        settings: The run's settings.
    """
    evaluation = settings.evaluation
    training = [settings.data.prompt_data, *(settings.data.prompt_mix or ())[1::2]]
    sources = [*training, *(evaluation.eval_prompt_data or ())[1::2], evaluation.eval_config]
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": versions(),
        "git": {"miles": _own_checkout(), "working_folder": git_state(Path.cwd())},
        "data": [*data_files(source for source in sources if source is not None)],
        "seeds": {"seed": settings.training.seed, "rollout_seed": settings.data.rollout_seed},
        "machine": machine(),
    }


def in_words(facts: dict[str, Any]) -> list[str]:
    """Return the facts that a reader wants first, as lines."""
    version = facts["versions"]
    git = facts["git"]["miles"]
    commit = "" if git is None else f", commit {git['commit'][:12]}{' with changes' if git['has_changes'] else ''}"
    others = ", ".join(f"{name} {version[name]}" for name in ("python", "torch", "ray") if version.get(name))
    host = facts["machine"]
    return [f"miles {version['miles']}{commit}; {others}", f"started {facts['started']} on {host['cores']} cores"]


def versions() -> dict[str, str | None]:
    """Return the versions of miles, Python and the main packages; None for a package that is not installed."""
    packages = {name: installed_version(name) for name in PACKAGES}
    return {"miles": miles.__version__, "python": platform.python_version(), **packages}


def _own_checkout() -> dict[str, Any] | None:
    """Return the git state of miles itself; None if it is installed, also into an environment within a checkout."""
    package = Path(miles.__file__).parent
    is_tracked = _git(package, "ls-files", "--error-unmatch", Path(miles.__file__).name) is not None
    return git_state(package) if is_tracked else None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout that ``folder`` is in, and whether files differ; None if it is in none.

    ``has_changes`` is None if git does not answer in time.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    return {"commit": commit, "branch": branch, "has_changes": None if changed is None else changed != ""}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or no answer in time
        return None
    return ended.stdout.strip()


def data_files(sources: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield path, size and SHA-256 of each source that is a local file. Each is read once."""
    for source in dict.fromkeys(sources):
        path = Path(source)
        if not os.path.isfile(source):
            yield {"source": source}
            continue
        size = path.stat().st_size
        row = {"source": source, "bytes": size, "sha256": _sha256(path)}
        yield row | ({"sha256_of_first_bytes": HASHED_BYTES} if size > HASHED_BYTES else {})


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    left = HASHED_BYTES
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Return the host's name, system, cores that this process may use, memory in bytes, and whether it has a GPU."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "has_gpu": has_gpu(),
        "python": sys.executable,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
