"""``miles doctor`` finds missing parts, states what their lack disables, and leaves live runs alone."""

import fcntl
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles.commands import doctor
from miles.commands import doctor as host
from miles.commands import doctor as packages
from miles.commands.doctor import (
    OTHERS,
    PACKAGES,
    SGLANG,
    SMOLLM2,
    Package,
    State,
    as_text,
    can_train,
    check_package,
    install_command,
)
from miles.run.leftovers import leftovers
from miles.run.run_guard import LOCK

REPO = Path(__file__).parents[4]


@pytest.fixture
def modules(tmp_path, monkeypatch) -> Path:
    """A folder of importable modules."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_quick_report_of_this_machine(capsys):
    assert doctor.main(["--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is True
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert {
        "python",
        "torch",
        "ray",
        "sglang",
        "cores",
        "memory",
        "shared memory",
        "ports",
        "leftovers",
    } <= by_name.keys()
    assert by_name["torch"]["state"] == "ok" and by_name["memory"]["facts"]["limit_bytes"] > 2**28


def test_the_doctor_itself_needs_python_alone():
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); from miles.commands import doctor;"
    code += "sys.exit(doctor.main(['--quick', '--json']))"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    by_name = {finding["name"]: finding for finding in json.loads(ended.stdout)["findings"]}
    assert (
        by_name["torch"]["state"] == "fault"
        and "not installed: aiohttp, argparse-dataclass" in (by_name["other packages"]["found"])
    )
    assert by_name["memory"]["state"] != "fault" and by_name["wandb"]["state"] == "missing"


def test_every_dependency_is_checked():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[=><]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {*OTHERS, *(package.name for package in PACKAGES if not package.disables)}


def test_a_package_that_training_needs_is_a_fault_and_another_one_disables_a_part():
    needed = check_package(Package("no-such-package", "no_such_package"), quick=True, seconds=1)
    assert (needed.state, needed.effect) == (State.FAULT, "disables training")
    other = check_package(Package("no-such-package", "x", "--use-x", "x", ("x==1",)), quick=True, seconds=1)
    assert (other.state, other.effect) == (State.MISSING, "disables --use-x")
    assert other.remedy.endswith("[x]' && pip install --no-deps x==1")
    assert can_train([other]) and not can_train([other, needed])
    assert as_text([other, needed]).endswith("training cannot run here: no-such-package")


def test_a_failing_or_endless_import_is_found_in_a_process_of_its_own(modules):
    (modules / "broken.py").write_text("raise ImportError('libnone.so: cannot open')\n")
    (modules / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    (modules / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    (modules / "fine.py").write_text("import sys\nprint('noise')\n")
    by_name = {
        name: check_package(Package("pytest", name, "something"), quick=False, seconds=seconds)
        for name, seconds in (("broken", 60), ("killed", 60), ("endless", 1), ("fine", 60))
    }
    assert "cannot be imported: ImportError: libnone.so: cannot open" in by_name["broken"].found
    assert "cannot be imported: exit code -9" in by_name["killed"].found
    assert "no end within 1 s (--timeout)" in by_name["endless"].found
    assert [by_name[name].state for name in by_name] == [State.MISSING] * 3 + [State.OK]


def test_torch_without_the_gpus_of_the_machine_is_reported(monkeypatch):
    facts = {"version": "2", "cuda": None, "devices": [], "gloo": True}
    assert packages._torch(facts).state == State.OK
    monkeypatch.setattr(packages, "has_gpu", lambda: True)
    finding = packages._torch(facts)
    assert finding.state == State.MISSING and "sees none of this machine's GPUs: a build for CPU" in finding.found
    gpu = {"name": "H", "memory_bytes": 2**37}
    assert packages._torch(facts | {"cuda": "13", "devices": [gpu, gpu]}).found == "2; 2 x H of 128 GiB"


def test_a_machine_with_a_gpu_is_asked_for_more(monkeypatch):
    assert "torch-memory-saver" not in {finding.name for finding in packages.check_packages(quick=True, seconds=1)}
    monkeypatch.setattr(packages, "has_gpu", lambda: True)
    finding = {finding.name: finding for finding in packages.check_packages(quick=True, seconds=1)}
    assert finding["torch-memory-saver"].effect == "disables --colocate with --rollout-engine sglang on GPUs"
    assert finding["torch-memory-saver"].remedy.endswith("[gpu]'")
    (sglang,) = [package for package in PACKAGES if package.name == "sglang"]
    assert sglang.remedy.startswith("use SGLang's own image"), "its kernels need another torch"


def test_commands_name_versions_that_are_tested(monkeypatch, tmp_path):
    pinned = (REPO / "constraints.txt").read_text().splitlines()
    assert {*SGLANG, SMOLLM2} <= {*pinned}
    extras = {package.extra for package in PACKAGES} - {""}
    project = (REPO / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in project for extra in extras)
    assert install_command("sglang", SGLANG).startswith(
        f"pip install -c {REPO}/constraints.txt -e '{REPO}[sglang]' && "
    )
    monkeypatch.setattr(packages.miles, "__file__", str(tmp_path / "miles" / "__init__.py"))
    assert install_command("sglang") == "pip install 'miles[sglang]'"


def test_limits_of_the_machine(tmp_path, monkeypatch):
    assert host.check_memory(2**40, 2**40).state == State.OK
    assert host.check_memory(2**40, 2**32).state == State.NOTE
    assert host.check_memory(2**30, 2**40).state == State.FAULT
    assert host.check_shared_memory(tmp_path / "none").state == State.NOTE
    assert host.check_temp(Path("/tmp") / ("x" * 60)).state == State.FAULT
    assert host.check_disk("disk", tmp_path / "not" / "yet").state != State.FAULT
    (tmp_path / "file").touch()
    assert host.check_disk("disk", tmp_path / "file").state == State.FAULT
    assert host.check_open_files(1024, 1024).state == State.NOTE
    assert host.check_loopback().state == State.OK
    monkeypatch.setattr(host, "cpu_quota", lambda: 0.5)
    assert "limits this process to 0.5 of them" in host.check_cores().found


def test_leftovers_are_listed_and_removed_and_live_runs_stay(tmp_path):
    for name in ("dead", "live"):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
        (tmp_path / name / "file").write_text("12345")
    (tmp_path / "other").mkdir()
    environment = {"MILES_RUN_FOLDER": str(tmp_path / "dead")}
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    with (
        (tmp_path / "live" / LOCK).open("a") as lock,
        subprocess.Popen(wait, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert process.stdout is not None
        process.stdout.readline()
        (leftover,), alive = leftovers(tmp_path, clean=False)
        assert (leftover.folder, leftover.size, leftover.pids, leftover.removed, alive) == (
            str(tmp_path / "dead"), 5, [process.pid], False, 1
        )  # fmt: skip
        (leftover,), alive = leftovers(tmp_path, clean=True)
        assert leftover.removed and alive == 1
        process.wait(timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live", LOCK, "other"]
    assert leftovers(tmp_path, clean=True)[0] != [], "the run has ended meanwhile"


def test_wrong_timeout_is_refused(capsys):
    above = "must be finite and above 0; give the seconds of an import"
    for wrong, fault in {"0": above, "nan": above, "inf": above, "1e+09": "must be at most 1000000"}.items():
        with pytest.raises(SystemExit, match="2"):
            doctor.main(["--timeout", wrong])
        assert f"--timeout {wrong}: {fault}" in capsys.readouterr().err
