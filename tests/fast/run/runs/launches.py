"""Run ``python train.py`` as a user does, in a process tree that a test can find."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from socket import SOCK_DGRAM

import psutil

from tests.fast.run.held.held_command import HeldCommand

REPO = Path(__file__).resolve().parents[4]
ONE_PROCESS = Path(__file__).with_name("in_one_process.py")
REWARDS = '''
import os, threading

def spread(samples):
    """Give the answers of a group different rewards. Wait forever, once per run, at iteration HOLD_AT of 4 groups."""
    if samples[0].group_index >= 4 * int(os.environ.get("HOLD_AT", 10**6)) and not os.path.exists(os.environ["HELD"]):
        open(os.environ["HELD"], "w").close()
        threading.Event().wait()
    return [sum(s.response_ids) % 7 / 7 for s in samples]

def stuck_rank(trajectories):
    """Wait in a loop on the last trainer rank: advantages, called by each rank between two collective operations."""
    import time
    import torch.distributed as dist
    while dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.01)
    return [trajectory.rewards for trajectory in trajectories]

def is_to_fail(samples):
    """Return whether the run is in iteration FAIL_AT (default: the first), where it fails; each has 4 groups."""
    return samples[0].group_index >= 4 * int(os.environ.get("FAIL_AT", 0))

def raises(samples):
    if is_to_fail(samples):
        raise KeyError("gold")
    return spread(samples)

'''
# Every Python process of a launch imports this. HOLD_FSYNC names a folder, whose files are never flushed to disk, and a
# file that is written when the first flush is attempted. HOLD_SERVER is the seed of the server that never starts; the
# other servers end at once.
HOLD = """
import os, sys, threading

def hold(file, flush=os.fsync):
    folder, held = os.environ["HOLD_FSYNC"].split(os.pathsep)
    number = file if isinstance(file, int) else file.fileno()
    if os.readlink(f"/proc/self/fd/{number}").startswith(folder):
        open(held, "w").close()
        threading.Event().wait()
    flush(file)

if "HOLD_FSYNC" in os.environ:
    os.fsync = hold
if "HOLD_SERVER" in os.environ and "sglang_on_cpu" in sys.orig_argv:
    if sys.orig_argv[sys.orig_argv.index("--random-seed") + 1] == os.environ["HOLD_SERVER"]:
        threading.Event().wait()
    print("this device is broken", flush=True)
    os._exit(3)
"""


OF_TIME = ("time/", "perf/", "weight_sync/")  # how metrics begin that differ between equal runs
UMASK = 0o027  # of every run: its group may read, others nothing
# The processes of a run on one machine that may listen, as docs/security.md lists them.
LOCAL_RAY = {
    "train.py",
    "gcs_server",
    "raylet",
    "ray::RuntimeEnvAgent",
    "ray::DashboardAgent",
    "ray::IDLE",
}
LOCAL_RAY |= {"ray::TrainActor", "ray::RolloutActor"}
VLLM_SERVER = "vllm.entrypoints.openai.api_server"
OF_SERVERS = {"ray::EngineActor", "sglang::router", "sglang::scheduler", "sglang_on_cpu"}


def kind_of(process):
    """Name a process of a run: its Ray class, its part of SGLang or vLLM, or its program."""
    words = process.cmdline() or [process.name()]
    if "::" in words[0]:
        return words[0].split()[0].split(".")[0]  # ray::TrainActor.connect
    named = ("train.py", "monitor.py", "dashboard.py", "sglang_on_cpu", VLLM_SERVER)
    modules = [Path(word).name for word in words if word.endswith(named)]
    return modules[0] if modules else Path(words[0]).name


def is_loopback(address):
    return ip_address(address.removeprefix("::ffff:")).is_loopback


class Launch:
    """A run in its own session."""

    def __init__(self, folder, flags, program=REPO / "train.py", **environment):
        self.output = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.start([sys.executable, program, *flags, "--output-dir", folder], environment)

    def start(self, command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
        """Start the process."""
        self.process = HeldCommand(
            list(map(str, command)),
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            umask=UMASK,
        )

    def wait(self):
        """Wait for the run to end and return its exit status. Its output is then in ``out`` and ``err``."""
        self.out, self.err = self.process.communicate()
        return self.process.returncode

    def said(self):
        """Return the lines of ``err`` without two notes: Ray starts late on a busy machine, and what ends an answer."""
        expected = ("Ray did not start within", "answers end at any of the tokens")
        return [line for line in self.err.splitlines() if not any(note in line for note in expected)]

    def interrupt(self):
        """Send SIGINT to the whole process group, as a terminal does for Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self):
        """Send SIGKILL to every process of this run and to no other."""
        self.process.end()
        self.process.communicate()

    def left(self):
        """Return the processes of this run that are still alive."""
        return self.process.processes()

    def command_lines(self):
        """Return pid and command line of every process."""
        commands = []
        for process in self.left():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                commands.append((process.pid, process.cmdline()))
        return commands

    def listening(self):
        """Return the addresses at which each kind of process listens (TCP) or receives (UDP), by a short name."""
        addresses = {}
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                for socket in process.net_connections("inet"):
                    if socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr):
                        addresses.setdefault(kind_of(process), []).append(socket.laddr.ip)
        return addresses

    def kill_worker(self, kind, number=signal.SIGKILL):
        """Send a signal to one actor of class ``kind``. Return False if none is running."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{kind}"):
                    process.send_signal(number)
                    return True
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return False

    def none_left(self, seconds=10):
        """Return whether all processes have ended, after waiting up to ``seconds``."""
        return self.process.none_left(seconds)

    def wait_until(self, holds, seconds=600):
        """Poll until ``holds()``. Fail if the run ends or ``seconds`` pass before."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "the run did not get there"
            try:
                self.process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the run ended early: {self.process.communicate()[1]}")

    def has_rows(self):
        """Return whether a step is logged."""
        return (self.output / "metrics.jsonl").exists() and bool(self.rows())

    def rows(self):
        """Return the rows of metrics.jsonl by step."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}


def trained(row):
    """Return the metrics that depend only on weights and data. (The canary runs only in the first step of a run.)"""
    return {name: value for name, value in row.items() if not name.startswith((*OF_TIME, "train/loss_mass"))}


def prepare_workplace(folder):
    """Write prompts.jsonl and reward functions that a run can import; return the folder."""
    rows = [
        {"input": [{"role": "user", "content": f"{n} + {n} ="}], "label": str(2 * n), "metadata": {}} for n in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "launch_rewards.py").write_text(REWARDS)
    (folder / "sitecustomize.py").write_text(HOLD)
    return folder


def small_run(workplace, model, reward="spread", ranks=1):
    """Return the flags of a run of 4 prompts x 4 samples per iteration."""
    base = {
        "device": "cpu",
        "hf-checkpoint": model,
        "prompt-data": workplace / "prompts.jsonl",
        "label-key": "label",
        "custom-rm-path": f"launch_rewards:{reward}",
        "rollout-batch-size": 4,
        "n-samples-per-prompt": 4,
        "rollout-max-response-len": 6,
        "global-batch-size": 8,
        "num-rollout": 6,
        "actor-num-gpus-per-node": ranks,
        "lr": 1e-3,
    }
    words = [word for flag, value in base.items() for word in (f"--{flag}", value)]
    return [*words, "--apply-chat-template", "--rollout-shuffle", "--fp32"]


def importing_from(workplace):
    """Return the value of PYTHONPATH that lets a run find the reward functions."""
    return os.pathsep.join(filter(None, [str(workplace), os.environ.get("PYTHONPATH")]))
