"""Runs whose launcher or whose Ray is killed: one true sentence, no process and no file of the run left."""

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from miles.base.locks import NAME
from miles.base.processes import RUN_FOLDER
from miles.engine.servers.leftovers import open_segments
from miles.run.local_access import private_session_root
from miles.run.stop_requests import STOPS
from tests.fast.run.runs.launches import REPO, kind_of, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVERS = ["--rollout-engine", "sglang", "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]
END_SECONDS = 60
KILLED_SECONDS = 5
IN_TERMINAL = f"""
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, {str(REPO / "train.py")!r}, *sys.argv[1:]])
while os.read(terminal, 1 << 16):
    pass
"""

# Reads one line of the output of a run, as `head -1` does, or gives it a full disk as output.
WITH_OUTPUT = f"""
import os, subprocess, sys
command = [sys.executable, {str(REPO / "train.py")!r}, *sys.argv[1:]]
if os.environ["OUTPUT"] == "head":
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        for line in run.stdout:
            if line.startswith(b"starting Ray"):
                break
        run.stdout.close()
else:
    with open("/dev/full", "w") as full, subprocess.Popen(command, stdout=full) as run:
        pass
sys.exit(run.returncode)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch):
    """Keep the folders of runs apart from other tests' folders at the same time. Short, as sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def files_of_runs():
    """Return the folders of runs of this test that are there now."""
    return {path.parent for path in Path(private_session_root()).glob("*/lock")}


def child(run, name):
    """Return the process of this program that the launcher started."""
    return next(each for each in psutil.Process(run.process.pid).children() if each.name() == name)


KILLED = "out of memory, or killed from outside)"


@pytest.mark.parametrize(
    ("name", "number", "why"),
    [
        ("gcs_server", signal.SIGKILL, KILLED),
        ("raylet", signal.SIGKILL, KILLED),
        ("raylet", signal.SIGTERM, "received SIGTERM), and its workers with it"),
    ],
)
def test_the_death_of_ray_is_one_sentence_and_the_run_resumes(launch, workplace, name, number, why):
    name_of_run = f"{name}_{number.name}"
    checkpoints = workplace / f"{name_of_run}_ckpt"
    before = files_of_runs()
    saving = ["--save", str(checkpoints), "--save-interval", "1", "--num-rollout"]
    run = launch(f"{name_of_run}_dies", *saving, "1000")
    run.wait_until(lambda: run.has_rows() and max(run.rows()) >= 4 and (checkpoints / "iter_0000001").exists())
    victim = child(run, name)
    began = time.monotonic()
    victim.send_signal(number)
    status = run.wait()
    took = time.monotonic() - began
    title = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}[name]
    (logs,) = run.output.glob("failure-*/ray_logs")
    assert run.err.splitlines()[-1] == (
        f"train.py: the run stopped: {title} (process {victim.pid}) died ({why}{'' if ')' in why else ')'}; "
        f"the same command with --load {checkpoints} continues from the last checkpoint; Ray's logs are in {logs}"
    )
    assert status == 1 and took < END_SECONDS
    assert "state-dump" not in run.err and "died" not in "".join(run.err.splitlines()[:-1])
    assert (logs / "raylet.out").stat().st_size > 0
    assert run.left() == [] and files_of_runs() <= before
    saved = max(int(path.name.removeprefix("iter_")) for path in checkpoints.glob("iter_*"))
    resumed = launch(f"{name_of_run}_resumed", *saving, str(saved + 1), "--load", str(checkpoints))
    assert resumed.wait() == 0, resumed.err
    assert max(resumed.rows()) == 2 * (saved + 1)
    assert resumed.none_left(0) and files_of_runs() <= before


@pytest.mark.parametrize(("name", "number"), [("gcs_server", signal.SIGKILL), ("raylet", signal.SIGTERM)])
def test_a_run_goes_on_in_another_ray_after_the_death_of_its_own(launch, workplace, name, number):
    before, run_name = files_of_runs(), f"{name}_again"
    checkpoints, held = workplace / f"{run_name}_ckpt", workplace / f"{run_name}.held"
    saving = ["--save", str(checkpoints), "--save-interval", "1", "--num-rollout", "3", "--max-restarts", "1"]
    run = launch(run_name, *saving, HOLD_AT="1", HELD=str(held))
    run.wait_until(lambda: held.exists() and (checkpoints / "iter_0000001").exists())
    child(run, name).send_signal(number)
    assert run.wait() == 0, run.err
    assert "restarting from its last checkpoint (0 restarts left); Ray's logs are in" in run.err
    assert sorted(run.rows()) == list(range(1, 7))
    assert run.none_left(0) and files_of_runs() <= before


@pytest.mark.parametrize(("number", "status"), [(number, 128 + number) for number in STOPS if number != signal.SIGINT])
def test_a_signal_to_all_processes_of_a_run_is_not_blamed_on_ray(launch, workplace, number, status):
    """As ``timeout`` and ``scancel`` send it: Ray's processes end too, and nothing is restarted."""
    checkpoints = workplace / f"group_{number.name}_ckpt"
    saving = ["--save", str(checkpoints), "--save-interval", "1", "--num-rollout", "1000", "--max-restarts", "1"]
    run = launch(f"group_{number.name}", *saving)
    run.wait_until(run.has_rows)
    files = Path(child(run, "raylet").environ()[RUN_FOLDER])
    os.killpg(run.process.pid, number)
    assert run.wait() == status, run.err
    assert run.err.splitlines()[-1].startswith(f"stopped by {number.name}; ")
    assert "GCS" not in run.err and "raylet" not in run.err and "restarting" not in run.err
    assert not list(run.output.glob("failure-*"))
    assert not (run.output / NAME).exists() and not (checkpoints / NAME).exists(), "a lock"
    assert run.left() == [] and not files.exists()


@pytest.mark.parametrize("kind", ["ray::TrainActor", "ray::RolloutActor"])
def test_a_signal_to_all_processes_while_workers_start_is_no_failure(launch, workplace, kind):
    name = f"starting_{kind.removeprefix('ray::')}"
    checkpoints = workplace / f"{name}_ckpt"
    saving = ["--save", str(checkpoints), "--save-interval", "1", "--num-rollout", "1000", "--max-restarts", "1"]
    run = launch(name, *saving)

    def has_worker():
        with suppress(psutil.Error):  # a process that has just ended
            return any(kind_of(each) == kind for each in run.left())

    run.wait_until(has_worker)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 143, run.err
    assert run.err.splitlines()[-1].startswith("stopped by SIGTERM; ")
    assert "restarting" not in run.err
    assert not list(run.output.glob("failure-*")) and not (run.output / NAME).exists()
    assert run.none_left(0)


def test_a_run_whose_terminal_is_closed_saves_and_leaves_nothing(launch, workplace):
    before, checkpoints, program = files_of_runs(), workplace / "terminal_ckpt", workplace / "in_terminal.py"
    program.write_text(IN_TERMINAL)
    run = launch("terminal", "--num-rollout", "1000", "--save", str(checkpoints), program=program)
    run.wait_until(run.has_rows)
    run.process.kill()  # the terminal closes with it, and the kernel sends SIGHUP
    assert run.none_left(END_SECONDS), run.left()
    assert files_of_runs() <= before
    (saved,) = checkpoints.glob("iter_*")
    assert max(run.rows()) == 2 * int(saved.name.removeprefix("iter_"))


def test_slurms_warning_finishes_and_saves_the_iteration(launch, workplace):
    before, checkpoints = files_of_runs(), workplace / "warned_ckpt"
    run = launch("warned", "--num-rollout", "1000", "--save", str(checkpoints))
    run.wait_until(run.has_rows)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0, run.err
    (saved,) = checkpoints.glob("iter_*")
    assert max(run.rows()) == 2 * int(saved.name.removeprefix("iter_"))
    assert run.err.splitlines()[-1].startswith(f"stopped by SIGUSR1; the same command with --load {checkpoints} ")
    assert run.none_left(0) and files_of_runs() <= before


def test_a_second_ctrl_c_does_not_wait_for_a_save_that_hangs(launch, workplace):
    before, checkpoints, held = files_of_runs(), workplace / "twice_ckpt", workplace / "twice.held"
    run = launch(
        "twice",
        "--num-rollout",
        "1000",
        "--save",
        str(checkpoints),
        HOLD_FSYNC=f"{checkpoints}/.writing{os.pathsep}{held}",
    )
    run.wait_until(run.has_rows)
    run.interrupt()
    run.wait_until(held.exists)
    began = time.monotonic()
    run.interrupt()
    assert run.wait() == 130 and time.monotonic() - began < END_SECONDS, run.err
    assert "Traceback" not in run.err and not list(checkpoints.glob("iter_*"))
    assert run.err.splitlines()[-1].startswith("stopped by the user; no checkpoint was saved in ")
    assert run.none_left(0) and files_of_runs() <= before


@pytest.mark.parametrize(("output", "why"), [("head", "was closed"), ("full", "cannot be written (No space left")])
def test_a_run_that_cannot_print_says_so(launch, workplace, output, why):
    before, checkpoints, program = files_of_runs(), workplace / f"{output}_ckpt", workplace / "with_output.py"
    program.write_text(WITH_OUTPUT)
    run = launch(output, "--num-rollout", "1000", "--save", str(checkpoints), program=program, OUTPUT=output)
    assert run.wait() == 1, run.err
    assert "Traceback" not in run.err
    assert f"the run stopped: standard output {why}" in run.err.splitlines()[-1], run.err
    assert run.none_left(0) and files_of_runs() <= before


@pytest.mark.parametrize(
    "flags", [[], ["--train-backend", "megatron"], ["--report-port", "0"]], ids=["fsdp", "megatron", "report"]
)
def test_nothing_is_left_of_a_run_whose_launcher_is_killed(launch, request, flags):
    before = files_of_runs()
    run = launch(f"launcher_killed_{request.node.callspec.id}", "--num-rollout", "1000", *flags)
    run.wait_until(run.has_rows)
    assert len(files_of_runs() - before) == 1
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.process.wait() == -signal.SIGKILL
    assert run.none_left(KILLED_SECONDS), run.left()
    assert files_of_runs() <= before


def test_the_next_run_removes_what_is_left_of_one_killed_with_its_guard(launch):
    pytest.importorskip("sglang")
    before = files_of_runs()
    run = launch("both_killed", "--num-rollout", "1000", *SERVERS)
    run.wait_until(run.has_rows)
    segments = open_segments(run.left())
    assert segments and len(files_of_runs() - before) == 1
    (guard,) = (each for each in run.left() if "miles.run.run_guard" in each.cmdline())
    guard.kill()
    run.process.kill()
    following = launch("both_killed_next", "--num-rollout", "1")
    assert following.wait() == 0, following.err
    assert run.none_left(0), run.left()
    assert files_of_runs() <= before and not [name for name in segments if Path(name).exists()]


def test_two_launchers_at_a_time_do_not_disturb_each_other(launch, workplace):
    """The same run alone and alongside another that is killed meanwhile has the same metrics."""
    before = files_of_runs()
    alone = launch("alone", "--num-rollout", "3")
    assert alone.wait() == 0, alone.err
    first, second = launch("first", "--num-rollout", "3"), launch("second", "--num-rollout", "1000")
    second.wait_until(second.has_rows)
    os.kill(second.process.pid, signal.SIGKILL)
    assert first.wait() == 0, first.err
    assert first.none_left(0) and second.none_left(KILLED_SECONDS) and files_of_runs() <= before
    rows = [{step: trained(row) for step, row in run.rows().items()} for run in (alone, first)]
    assert rows[0] == rows[1]
