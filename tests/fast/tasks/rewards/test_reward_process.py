"""A user's reward function cannot stop, fill or end the rollout side, whatever it does."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from miles.base.text import InputError
from miles.tasks.rewards import reward_process, reward_worker
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.reward_process import RewardProcess
from miles.tasks.rewards.sandboxed import uses_more
from miles.tasks.rewards.scoring import RewardError, score
from miles.tasks.rewards.settings import RewardArguments

MODULE = "reward_functions_for_test"
CODE = """
import asyncio, ctypes, math, os, struct, subprocess, sys, threading, time, zlib

def fine(samples): return [float(len(s.response)) for s in samples]
def pid(samples): return [float(os.getpid()) for s in samples]
def none(samples): return None
def nan(samples): return [math.nan for s in samples]
def text(samples): return ["1" * 10**7 for s in samples]
def numbers(samples):
    import decimal, fractions, numpy, torch
    tensors = torch.tensor(1), torch.tensor([0.5], requires_grad=True), numpy.float32(2), numpy.bool_(True)
    return [decimal.Decimal("0.25"), fractions.Fraction(1, 2), *tensors, True, 10**20]
def huge(samples): return [1e308 for s in samples]
def unconvertible(samples): return [type("Odd", (), {"__float__": lambda self: 1 / 0})() for s in samples]
def too_few(samples): return [1.0] * (len(samples) - 1)
def a_number(samples): return 1.0
def stop_iteration(samples): return next(iter(()))
def exits(samples): raise SystemExit(3)
def interrupted(samples): raise KeyboardInterrupt
def shouts(samples): raise ValueError("x" * 10**7 + "\\x1b[2J\\n")
class Silent(Exception):
    def __str__(self): raise ValueError
class SilentEnd(BaseException):
    __str__ = Silent.__str__
def fails_to_say(samples): raise Silent
def ends_without_words(samples): raise SilentEnd
def os_exit(samples): os._exit(7)
def crashes(samples): ctypes.string_at(0)
def exits_for_bad(samples):
    if any(s.response == "bad" for s in samples): os._exit(7)
    time.sleep(0.3)
    return fine(samples)
def allocates(samples):
    kept = []
    while True: kept.append(bytearray(b"x") * (64 << 20))
def allocates_in_children(samples):
    code = "import sys; kept = b'x' * (300 << 20); sys.stdin.read()"
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(3)]
    return [float(child.wait()) for child in children]
def never(samples): threading.Event().wait()
async def blocks(samples): threading.Event().wait()
async def awaits(samples): await asyncio.Event().wait()
together = asyncio.Barrier(60)
async def wait_for_60(samples):
    await together.wait()
    return fine(samples)
blocked = []
def blocks_for_bad(samples):
    blocked.extend(s for s in samples if s.response == "bad")
    if blocked: threading.Event().wait()  # the calls alongside it too, but not when they are made again
    return fine(samples)
def hangs_for_bad(samples):
    if any(s.response == "bad" for s in samples): never(samples)
    return fine(samples)
def prints(samples):
    for _ in range(100): os.write(1, b"y" * 10_000_000)
    print("\\x1b[31mafter")
    return fine(samples)
def leaves_children(samples):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    shell = subprocess.run(["sh", "-c", "setsid sleep 1001 > /dev/null 2>&1 & echo $!"], capture_output=True)
    return [float(os.getpid()) for s in samples]
def its_files(): return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
def to_each(data):
    for fd in its_files():
        try: os.write(fd, data)
        except OSError: pass
def writes_garbage(samples):
    to_each(b"garbage")
    return fine(samples)
def writes_much(samples):
    to_each(b"y" * 100_000)
    return fine(samples)
def writes_zeros(samples):
    to_each(bytes(64))
    return fine(samples)
def forges(samples):
    reply = b'{"number": 0, "rewards": [77.0]}'
    for token in (b"", *map(str.encode, [*sys.argv, *os.environ.values()])):
        to_each(token[:16] + struct.pack("!QI", len(reply), zlib.crc32(reply)) + reply)
    return fine(samples)
def closes(samples):
    os.closerange(3, 256)
    return fine(samples)
def closes_and_waits(samples):
    os.closerange(3, 256)
    threading.Event().wait()
def replaces(samples):
    os.closerange(3, 256)
    files = [open("replaced", "a") for _ in range(30)]
    return fine(samples)
called = []
def changes(samples):
    called.append(samples)
    if len(called) > 1: threading.Event().wait()
    for fd in its_files():
        try: os.set_blocking(fd, False)
        except OSError: pass
    return fine(samples)
def writes_for_bad(samples):
    time.sleep(0.3)
    return writes_garbage(samples) if any(s.response == "bad" for s in samples) else fine(samples)
def reads_standard_input(samples): return [float(len(sys.stdin.read())) for s in samples]
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Make the process of a function; all are ended after the test."""
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, seconds=20.0, memory=0, key=None):
        made.append(RewardProcess(f"{MODULE}:{name}", key, seconds, memory))
        return made[-1]

    yield make
    for each in made:
        each._shared.stop()


def scored(function, samples, **more):
    return asyncio.run(asyncio.wait_for(score(samples, function, more.pop("error_value", None), **more), timeout=60))


def fault_of(function, samples):
    with pytest.raises(RewardError) as caught:
        scored(function, samples)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 900
    assert f"the reward function {MODULE}:" in message and "prompt prompts.jsonl:17, group 5" in message
    return message


def test_what_float_accepts_is_a_reward(process, make_sample):
    samples = [make_sample("a") for _ in range(8)]
    scored(process("numbers"), samples)
    assert [sample.reward for sample in samples] == [0.25, 0.5, 1, 0.5, 2, 1, 1, 1e20]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("none", "returned NoneType None; return a list, one number per sample"),
        ("nan", "returned float nan, which is not a finite number"),
        ("huge", "returned float 1e+308, whose sums overflow; prompt"),
        ("unconvertible", "returned Odd <"),
        ("text", "returned str '1111"),
        ("too_few", "returned 0 rewards for 1 samples; return one per sample"),
        ("a_number", "returned float 1.0; return a list"),
        ("stop_iteration", "raised StopIteration"),
        ("exits", "exits raised SystemExit: 3;"),
        ("interrupted", "raised KeyboardInterrupt"),
        ("shouts", "raised ValueError: xxx"),
        ("fails_to_say", "raised Silent: (its str raises ValueError)"),
        ("ends_without_words", "raised SilentEnd: (its str raises ValueError)"),
        ("os_exit", "ended its process with exit code 7, as os._exit does"),
        ("crashes", "ended its process with SIGSEGV, a crash of the interpreter or a kill"),
    ],
)
def test_every_fault_is_a_reward_error(process, make_sample, name, fault):
    assert fault in fault_of(process(name), [make_sample("a")])


def test_the_traceback_of_a_function_is_short_and_has_no_control_characters(process, make_sample):
    with pytest.raises(RewardError) as caught:
        scored(process("shouts"), [make_sample("a")])
    [note] = caught.value.__notes__
    assert f"{MODULE}.py" in note and "in shouts" in note and note.count("File ") == 1, "no frame of miles"
    assert len(note) < 15_000 and all(line.isprintable() for line in note.split("\n"))


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("writes_garbage", "wrote into"),
        ("writes_much", "wrote into"),
        ("writes_zeros", "wrote into"),
        ("forges", "wrote into"),
        ("closes", "closed"),
        ("closes_and_waits", "closed"),
        ("replaces", "closed"),
    ],
)
def test_a_function_that_disturbs_the_pipes_of_its_process_is_at_fault(
    process, make_sample, tmp_path, monkeypatch, capfd, name, verb
):
    monkeypatch.chdir(tmp_path)
    function, sample = process(name, seconds=0.0), make_sample("a")
    for _ in range(2):
        assert f"{verb} a pipe of its process (a file descriptor above 2" in fault_of(function, [sample])
    assert scored(function, [sample], error_value=-1.0) == 1 and sample.reward == -1.0
    assert "Traceback" not in capfd.readouterr().err
    assert not any(path.stat().st_size for path in tmp_path.glob("replaced")), "no reply is written to a user's file"


def test_a_function_that_changes_the_pipe_of_its_calls_is_at_fault(process, make_sample):
    function, sample = process("changes", seconds=0.0), make_sample("a")
    assert scored(function, [sample]) == 0 and sample.reward == 1.0
    assert "read from a pipe of its process, or changed it (a file descriptor" in fault_of(function, [sample])


@pytest.mark.parametrize("name", ["never", "blocks", "awaits"])
def test_a_call_that_does_not_return_ends_in_time_and_the_next_one_works(process, make_sample, name):
    function = process(name, seconds=1.0)
    assert "did not return within 1 s (--reward-timeout)" in fault_of(function, [make_sample("a")])
    assert "did not return within 1 s" in fault_of(function, [make_sample("a")])


@pytest.mark.parametrize("failed", [{"error_value": -1.0}, {"drop": True}], ids=str)
def test_a_function_that_never_returns_stops_the_run_in_any_case(process, make_sample, failed, monkeypatch):
    monkeypatch.setattr(reward_process, "MOST_TIMEOUTS", 3)
    function = process("never", seconds=0.5)
    fault = r"did not return within 0.5 s.*, 3 times in a row, and no other call returned"
    with pytest.raises(RewardError, match=fault):
        scored(function, [make_sample("a") for _ in range(256)], **failed)


def test_a_function_that_returns_at_times_is_not_stuck(process, make_sample, monkeypatch):
    monkeypatch.setattr(reward_process, "MOST_TIMEOUTS", 3)
    function, bad = process("hangs_for_bad", seconds=1.0), [make_sample("bad") for _ in range(5)]
    for _ in range(2):
        assert scored(function, bad, error_value=-1.0) == 5, "those at the same time are one timeout in a row"
        assert scored(function, [make_sample("ccc")], error_value=-1.0) == 0


def test_the_flags_bound_a_reward(process, make_sample):
    process("fine")  # makes the module importable
    reward = RewardArguments(custom_rm_path=f"{MODULE}:never", reward_timeout=1.0, reward_error_value=-1.0)
    samples = [make_sample("a"), make_sample("b")]
    assert scored(get_reward_function(reward), samples, error_value=reward.reward_error_value) == 2
    assert [sample.reward for sample in samples] == [-1.0, -1.0]


def test_importing_the_module_is_bounded_too_and_said_to_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(reward_process, "IMPORT_SECONDS", 2.0)
    monkeypatch.setattr(reward_process, "REMINDER_SECONDS", 0.5)
    (tmp_path / "slow_to_import.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="--custom-rm-path slow_to_import:f: importing its module takes more than 2 s"):
        RewardProcess("slow_to_import:f", None, 20.0, 0)
    assert "--custom-rm-path slow_to_import:f: its module has been importing for" in caplog.text


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("ends_at_import", "import os\nos._exit(5)\n", "importing its module ended its process with exit code 5"),
        ("closes_at_import", "import os\nos.closerange(3, 99)\n", "importing its module closed a pipe of its process"),
        ("raises_at_import", "raise RuntimeError('no GPU')\n", "its module raised RuntimeError: no GPU"),
        ("not_there", None, "cannot import module not_there"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, module, source, fault):
    if source is not None:
        (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=f"--custom-rm-path {module}:f: {fault}"):
        RewardProcess(f"{module}:f", None, 20.0, 0)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("allocates", "raised MemoryError|used more than 0.5 GiB"), ("allocates_in_children", "used more than 0.5 GiB")],
)
def test_memory_is_bounded(process, make_sample, name, fault):
    assert re.search(fault, fault_of(process(name, memory=1 << 29), [make_sample("a")]))


@pytest.mark.parametrize("name", ["exits_for_bad", "writes_for_bad"])
def test_only_the_sample_that_ends_the_process_or_disturbs_its_pipes_is_at_fault(process, make_sample, name):
    function = process(name)
    batches = [[make_sample("a"), make_sample("bad"), make_sample("ccc")], [make_sample("dddd")], [make_sample("ee")]]

    async def all_at_once():
        return await asyncio.gather(*(score(batch, function, -1.0) for batch in batches))

    assert asyncio.run(asyncio.wait_for(all_at_once(), 60)) == [1, 0, 0]
    assert [[sample.reward for sample in batch] for batch in batches] == [[1.0, -1.0, 3.0], [4.0], [2.0]]


def test_an_async_function_waits_in_many_calls_at_the_same_time(process, make_sample):
    function = process("wait_for_60", seconds=60.0)
    samples = [make_sample("x" * length) for length in range(60)]

    async def all_at_once():
        return await asyncio.gather(*(score([sample], function, None) for sample in samples))

    assert asyncio.run(asyncio.wait_for(all_at_once(), 60)) == [0] * 60
    assert [sample.reward for sample in samples] == [float(length) for length in range(60)]


def test_calls_beside_one_that_hangs_are_made_again_in_one_new_process(process, make_sample):
    function = process("blocks_for_bad", seconds=3.0)
    batches = [[make_sample("bad")], [make_sample("dddd")], [make_sample("ee")], [make_sample("f")]]

    async def one_and_then_the_others():
        first = asyncio.create_task(score(batches[0], function, -1.0))
        while not function._shared._pending:
            await asyncio.sleep(0)
        function._seconds = 0.0  # the other calls, in progress when the first one is given up, have no limit
        return await asyncio.gather(first, *(score(batch, function, -1.0) for batch in batches[1:]))

    assert asyncio.run(asyncio.wait_for(one_and_then_the_others(), 60)) == [1, 0, 0, 0]
    assert [batch[0].reward for batch in batches[1:]] == [4.0, 2.0, 1.0]
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    running = [child.pid for child in alive if f"{MODULE}:blocks_for_bad" in child.as_dict(["cmdline"], [])["cmdline"]]
    assert running == [function._shared._process.pid]


def test_a_call_for_a_process_that_another_call_has_just_ended_is_made_again(process, make_sample, monkeypatch):
    function, sample = process("exits_for_bad"), make_sample("ccc")
    assert scored(function, [make_sample("bad")], error_value=-1.0) == 1
    ended = function._shared

    async def found_alive():
        return ended

    monkeypatch.setattr(function, "_living_worker", found_alive)
    assert scored(function, [sample]) == 0 and sample.reward == 3.0


def test_the_worker_ends_with_its_supervisor_and_is_replaced(process, make_sample):
    function, sample = process("fine"), make_sample("ccc")
    supervisor = psutil.Process(function._shared._process.pid)
    (worker,) = supervisor.children()
    supervisor.kill()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    while function._shared.alive:
        time.sleep(0.01)
    assert scored(function, [sample]) == 0 and sample.reward == 3.0


def test_a_process_that_is_ending_has_not_closed_its_pipes():
    pipes = reward_worker._Pipes(*os.pipe())
    with subprocess.Popen(["true"]) as ending:
        os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)  # it has no files any more
        assert pipes.are_open_in(ending.pid) and pipes.are_open_in(os.getpid())
    os.close(pipes.requests)
    assert not pipes.are_open_in(os.getpid())
    os.close(pipes.replies)


def test_the_process_is_kept_between_calls(process, make_sample):
    function = process("pid")
    samples = [make_sample("a"), make_sample("b")]
    assert scored(function, samples) == 0 and scored(function, samples[:1]) == 0
    assert samples[0].reward == samples[1].reward != os.getpid()


def test_without_a_limit_a_call_takes_its_time(process, make_sample):
    sample = make_sample("ccc")
    assert scored(process("exits_for_bad", seconds=0.0), [sample]) == 0 and sample.reward == 3.0


def test_standard_input_is_empty(process, make_sample):
    sample = make_sample("a")
    assert scored(process("reads_standard_input"), [sample]) == 0
    assert sample.reward == 0.0


def test_a_gigabyte_of_output_is_cut_and_control_characters_are_removed(process, make_sample, capfd):
    others = threading.enumerate()
    function = process("prints", seconds=60.0)
    (reader,) = [each for each in threading.enumerate() if each.name == "reward-output" and each not in others]
    assert scored(function, [make_sample("abc")]) == 0
    function._shared.stop()
    reader.join(30)
    assert not reader.is_alive()
    output = capfd.readouterr().err
    assert len(output) < 500_000 and "\x1b" not in output
    assert "more bytes of its output are not shown" in output


def children_of(pid):
    return psutil.Process(pid).children(recursive=True)


def test_children_left_behind_end_with_the_run(process, make_sample):
    function = process("leaves_children")
    assert scored(function, [make_sample("a")]) == 0
    supervisor = function._shared._process.pid
    while sum("sleep" in child.name() for child in children_of(supervisor)) < 2:  # the shell starts one of them later
        time.sleep(0.02)
    left = children_of(supervisor)
    function._shared.stop()
    psutil.wait_procs(left, timeout=60)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in left)


PARENT = f"""
import asyncio, os, sys
from miles.tasks.rewards.reward_process import RewardProcess
from miles.types.sample import Prompt, Sample
function = RewardProcess("{MODULE}:leaves_children", None, 20.0, 0)
asyncio.run(function([Sample(Prompt("q", (1,)), 0, 0)]))
print(function._shared._process.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_the_rollout_side_is_killed(tmp_path):
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    root = str(Path(__file__).parents[4])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"},
        text=True,
    )
    assert parent.stdout is not None
    supervisor = psutil.Process(int(parent.stdout.readline()))
    left = [supervisor, *supervisor.children(recursive=True)]
    assert len(left) >= 4
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    psutil.wait_procs(left, timeout=60)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in left)


def test_dropped_samples_get_no_reward(process, make_sample):
    function = process("exits_for_bad")
    samples = [make_sample("a"), make_sample("bad")]
    assert scored(function, samples, drop=True) == 1
    assert [sample.reward for sample in samples] == [1.0, None]


def test_shared_memory_counts_once():
    program = (
        "import mmap, os, sys\nkept = mmap.mmap(-1, 64 << 20)\nfor _ in range(64): kept.write(b'x' * (1 << 20))\n"
        "other = os.fork()\nassert kept[::4096].count(b'x') == 16384\nos.write(1, b'%d\\n' % os.getpid())\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert uses_more(pids, 60 << 20) and not uses_more(pids, 120 << 20)
        process.stdin.close()
