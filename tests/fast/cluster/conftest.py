"""``python train.py`` as a user types it, in a process tree that a test can find again."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

REPO = Path(__file__).resolve().parents[3]
REWARDS = '''
import os, signal, threading

def spread(samples):
    """A reward in which the answers of a group differ; it waits for ever at rollout HOLD_AT of 4 groups, once a run."""
    if samples[0].group_index >= 4 * int(os.environ.get("HOLD_AT", 10**6)) and not os.path.exists(os.environ["HELD"]):
        open(os.environ["HELD"], "w").close()
        threading.Event().wait()
    return [sum(s.response_ids) % 7 / 7 for s in samples]

def raises(samples):
    raise KeyError("gold")

def dies(samples):
    if samples[0].group_index >= 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return spread(samples)
'''
# Every Python process of a launch imports this: in HOLD_FSYNC are a folder, in which no file is ever flushed to the
# disk, and a file that says when one would have been; HOLD_SERVER is the seed of the server that never starts, while
# the others end at once.
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


def _hear_ctrl_c():
    """A shell that runs the tests in the background has SIGINT ignored in them, and in what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Launch:
    """A run in a session of its own. Every process of it inherits a mark in its environment, by which it is known."""

    def __init__(self, folder, flags, **environment):
        self.output = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        environ = {**os.environ, "LAUNCH_MARK": self.mark, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, REPO / "train.py", *flags, "--output-dir", folder]
        self.process = subprocess.Popen(
            list(map(str, command)),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_ctrl_c,
        )

    def wait(self):
        """Exit status, when the run has ended; what it printed is in ``out`` and ``err``."""
        self.out, self.err = self.process.communicate()
        return self.process.returncode

    def interrupt(self):
        """Ctrl-C: a terminal sends SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self):
        """SIGKILL every process of this run, and no other."""
        for process in self.left():
            process.kill()
        self.process.communicate()

    def left(self):
        """The processes of this run that still live."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def kill_worker(self, kind, number=signal.SIGKILL):
        """Send a signal to one actor of class ``kind``; False where none is up at the moment."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{kind}"):
                    process.send_signal(number)
                    return True
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return False

    def none_left(self, seconds=10):
        """True when all are gone; those that have just been told to end are given ``seconds``."""
        _, alive = psutil.wait_procs(self.left(), timeout=seconds)
        return not alive

    def _is_mine(self, process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("LAUNCH_MARK") == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def wait_until(self, holds, seconds=180):
        """Poll until ``holds()``; fails when the run ends, or ``seconds`` pass, before."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, "the run did not get there"
            try:
                self.process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the run ended early: {self.process.communicate()[1]}")

    def has_rows(self):
        """Whether a step is logged."""
        return (self.output / "metrics.jsonl").exists() and bool(self.rows())

    def rows(self):
        """The steps of metrics.jsonl by number."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder with prompts.jsonl, and reward functions that a run can import."""
    folder = tmp_path_factory.mktemp("launches")
    rows = [
        {"input": [{"role": "user", "content": f"{n} + {n} ="}], "label": str(2 * n), "metadata": {}} for n in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "launch_rewards.py").write_text(REWARDS)
    (folder / "sitecustomize.py").write_text(HOLD)
    return folder


@pytest.fixture(scope="session")
def launch(workplace, tiny_model):
    """``launch(name, *flags, **environment)`` starts a run of 4 prompts x 4 samples a rollout; killed at the end."""
    started = []

    def start(name, *flags, reward="spread", ranks=1, **environment):
        base = {
            "device": "cpu",
            "hf-checkpoint": tiny_model,
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
        words += ["--apply-chat-template", "--rollout-shuffle", *flags]
        started.append(Launch(workplace / name, words, PYTHONPATH=str(workplace), **environment))
        return started[-1]

    yield start
    for run in started:
        run.kill()
