"""The container takes the steps of the tested script: its RUN is executed here, without pip's downloads."""

import os
import re
import shlex
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
INSTRUCTIONS = {"ARG", "FROM", "RUN", "COPY", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
# python3 -m venv FOLDER makes an interpreter that writes down the arguments of its calls.
PYTHON3 = """#!/bin/sh
mkdir -p "$3/bin" && printf '#!/bin/sh\\necho "$PIP_EXTRA_INDEX_URL" "$@" >>"%s"\\n' "$CALLS" >"$3/bin/python"
chmod +x "$3/bin/python"
"""


def instructions(path=REPO / "Containerfile"):
    """Return the instructions as (word, rest), with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in joined]


def installing():
    """Return the index of the RUN that makes the environment, and its commands."""
    matches = [(at, rest) for at, (word, rest) in enumerate(instructions()) if word == "RUN" and "venv.sh" in rest]
    assert len(matches) == 1
    return matches[0]


def run_step(device, tmp_path):
    """Execute that RUN in a copy of the files that precede it; return its exit status, and the calls of Python."""
    place, commands = installing()
    checkout, programs = tmp_path / "checkout", tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").write_text(PYTHON3)
    (programs / "python3").chmod(0o755)
    for word, rest in instructions()[:place]:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                file = checkout / (target if not target.endswith("/") else Path(target) / source)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes((REPO / source).read_bytes())
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    environ = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "VENV": str(tmp_path / "venv"),
        "CPU_WHEELS": arguments["CPU_WHEELS"],
        "DEVICE": device or arguments["DEVICE"],
    }
    status = subprocess.run(["sh", "-c", commands], cwd=checkout, env=environ, capture_output=True).returncode
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    return status, [line.replace(str(checkout), "ROOT") for line in calls if " install " in line]


@pytest.mark.parametrize("device", ["", "cuda"])
def test_the_environment_is_made_by_the_tested_script(device, tmp_path):
    status, calls = run_step(device, tmp_path)
    assert status == 0
    torch, project, without_dependencies = calls
    pinned = (REPO / "constraints.txt").read_text().splitlines()
    assert torch.split()[-1] in pinned and torch.split()[-1].startswith("torch==")
    assert torch.startswith("https://" if not device else " ")  # an index of builds for CPU, or none but pip's own
    extras = re.search(r"-c ROOT/constraints.txt -e ROOT\[(.*)\]$", project)[1].split(",")
    assert {*extras} <= {*PROJECT["optional-dependencies"]} and "dev" not in extras
    assert ("gpu" in extras) == bool(device)
    assert {"sglang", "megatron", "quickstart"} <= {*extras}
    assert " --no-deps " in without_dependencies and " sglang==" in without_dependencies
    assert (tmp_path / "venv" / ".miles-stamp").exists()


def test_an_unknown_device_is_refused(tmp_path):
    assert run_step("tpu", tmp_path) == (1, [])


def test_nothing_else_is_installed_and_the_code_comes_last():
    steps = instructions()
    assert {word for word, _ in steps} <= INSTRUCTIONS
    place, _ = installing()
    assert not [rest for word, rest in steps if word == "RUN" and re.search(r"\bpip3? ", rest)]
    assert ("COPY", ". .") in steps[place:], "a change of the code builds no environment again"
    values = dict(word.split("=", 1) for kind, rest in steps if kind == "ENV" for word in shlex.split(rest))
    assert values["PATH"].startswith(f"{values['VENV']}/bin:")
    version = dict(rest.split("=") for word, rest in steps if word == "ARG" and "VERSION" in rest)["PYTHON_VERSION"]
    assert version in re.findall(r"3\.\d+", (REPO / "README.md").read_text()), "a version that is supported"
    assert any(rest == '["miles"]' for word, rest in steps if word == "ENTRYPOINT")


def test_the_extra_gpu_has_the_versions_that_sglang_asks_for():
    wanted = {text.split(";")[0].strip().replace("_", "-") for text in metadata.requires("sglang")}
    assert {*PROJECT["optional-dependencies"]["gpu"]} <= wanted
