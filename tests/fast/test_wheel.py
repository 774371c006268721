"""The wheel holds every file of the package, and its commands work in a folder that is no checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

REPO = Path(__file__).parents[2]
FLAGS = "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 10"
FLAGS += " --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 64"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pip(*words):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build from a copy: setuptools writes beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(REPO / "miles", source / "miles", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    pip("wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (found,) = folder.glob("miles-*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel, which finds the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip("--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def miles(environment, tmp_path):
    """Run the installed command in another folder."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words, program="miles"):
        command = [environment / "bin" / program, *words]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)

    return run


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    files = {
        str(path.relative_to(REPO))
        for path in (REPO / "miles").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("miles/")}
    assert packed == files


def test_the_commands_work_elsewhere(miles, environment, tmp_path):
    shown = miles("--help")
    assert shown.returncode == 0 and "quickstart" in shown.stdout and "doctor" in shown.stdout, shown.stderr
    assert miles("quickstart", "--help").stdout.startswith("usage: miles quickstart [MODEL_FOLDER]")
    explained = miles("explain", *FLAGS.split())
    assert explained.returncode == 0 and explained.stdout.startswith("Objective\n"), explained.stderr
    checked = miles("doctor", "--quick", "--json")
    found = {finding["name"]: finding for finding in json.loads(checked.stdout)["findings"]}
    assert Path(found["miles"]["facts"]["folder"]).is_relative_to(environment)
    missing = miles("report", "nowhere")
    assert missing.returncode == 2 and "no run.json there" in missing.stderr
    code = "import miles, sys; print(miles.Settings.from_flags(sys.argv[1]).optimizer.lr)"
    assert miles("-c", code, FLAGS, program="python").stdout == "1e-06\n"


def test_the_page_of_a_run_is_written_by_the_wheel(miles, tmp_path):
    from tests.fast.support.run_folder import write_run

    write_run(tmp_path / "run", steps=10)
    ended = miles("report", "run", "--static", "page.html")
    assert ended.returncode == 0, ended.stderr
    assert "uPlot" in (tmp_path / "page.html").read_text(encoding="utf-8")
