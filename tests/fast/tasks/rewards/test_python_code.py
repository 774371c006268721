"""Programs that a model wrote, in a real sandbox. Needs a kernel that permits namespaces."""

import json
import os
import socket
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.text import InputError
from miles.tasks.rewards import sandbox
from miles.tasks.rewards.built_in import python_code
from miles.tasks.rewards.built_in.python_code import PythonCode, PythonCodeFlags, is_same, is_same_output, read_tests
from miles.tasks.rewards.sandbox import CodeTest, Limits, Outcome, SandboxRefused, run_tests
from miles.types.sample import Prompt

REWARD = PythonCode()

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def permitted():
    try:
        run_tests("", [CodeTest(stdin="")], Limits(), isolated=True)
    except SandboxRefused:
        return False
    return True


@pytest.fixture(scope="module")
def isolated():
    if not permitted():
        pytest.skip("this kernel permits no namespaces")


@pytest.fixture
def short_folder():
    """A folder that keeps the address of a Unix socket short enough."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def block(program):
    return f"<think>```python\nwrong\n```</think>\n```python\n{program}\n```\n"


def test_programs_are_run_on_every_input(make_sample, isolated):
    tests = {"inputs": ["1 2", "30 4"], "outputs": ["3\n", "34"]}
    good = block("print(sum(map(int, input().split())), ' ')")
    first_only = block("input()\nprint(3)")
    samples = [make_sample(text, metadata=tests) for text in (good, first_only, "print(3)", block("import nothing"))]
    assert REWARD(samples) == [1, 0, 0, 0]
    assert REWARD.score(samples, PythonCodeFlags(code_share=True)) == [1, 0.5, 0, 0]


def test_the_flags_bound_each_program(make_sample, monkeypatch):
    seen = []
    monkeypatch.setattr(python_code, "run_tests", lambda program, tests, limits, **_: seen.append(limits))
    flags = PythonCodeFlags(code_seconds=3, code_memory=0.5, code_processes=2)
    assert REWARD.score([make_sample(block("1"), metadata={"tests": ["assert 1"]})], flags) == [0]
    assert seen == [Limits(3, 1 << 29, 2, Limits.file_bytes + len('""'))]  # more than the longest expected output


def test_functions_are_called_with_arguments(make_sample, isolated):
    label = json.dumps({"fn_name": "pair", "inputs": [[1, 2], ["a", None]], "outputs": [[2, 1], [None, "a"]]})
    good = "class Solution:\n    def pair(self, a, b):\n        print('noise')\n        return (b, a)"
    cheat = "import os\ndef pair(a, b):\n    os._exit(0)"
    assert REWARD([make_sample(block(text), label) for text in (good, cheat, "pair = 3")]) == [1, 0, 0]


def test_a_result_may_be_in_a_list_of_its_own_and_of_numpy(make_sample, isolated):
    label = json.dumps({"fn_name": "f", "inputs": [[3], [4]], "outputs": [[3], [4]]})
    programs = ["def f(x): return x", "import numpy as np\ndef f(x): return np.int64(x)", "def f(x): return [3]"]
    assert REWARD([make_sample(block(text), label) for text in programs]) == [1, 1, 0]


def test_a_number_may_have_more_digits_than_python_prints(make_sample, isolated):
    sample = make_sample(block("print(10 ** 5000)"), metadata={"inputs": [""], "outputs": ["1" + "0" * 5000]})
    assert REWARD([sample]) == [1]


def test_statements_follow_the_program(make_sample, isolated):
    tests = {"tests": ["assert double(2) == 4", "assert double('a') == 'aa'", "assert math.isclose(double(2), 4.0)"]}
    programs = ["def double(x): return 2 * x", "import sys; sys.exit(0)", "import os; os._exit(0)"]
    assert REWARD([make_sample(block(text), metadata=tests) for text in programs]) == [1, 0, 0]


def test_a_program_indented_further_than_its_fence_is_run(make_sample, isolated):
    sample = make_sample(
        "- ```py\n    if True:\n        print(7)\n  ```\n", metadata={"inputs": [""], "outputs": ["7"]}
    )
    assert REWARD([sample]) == [1]


FIRST_TESTS_ONLY = {
    "processes": "import subprocess, sys\nfor _ in range(30): subprocess.Popen([sys.executable, '-c', 'input()'])",
    "memory": "import os\npart = os.fork()\nx = bytearray(150 << 20)\nwhile True: pass",
}


@pytest.mark.parametrize("kind", FIRST_TESTS_ONLY)
def test_a_sandbox_that_ends_early_fails_the_tests_that_it_did_not_reach(kind, make_sample, isolated):
    program = f"number = input()\nprint(number)\nif number == '3':\n    exec({FIRST_TESTS_ONLY[kind]!r})"
    numbers = ["1", "2", "3", "4"]
    sample = make_sample(block(program), metadata={"inputs": numbers, "outputs": numbers})
    limits = {"code_memory": 0.25, "code_processes": 4, "code_seconds": 4}
    assert REWARD.score([sample], PythonCodeFlags(**limits)) == [0]
    assert REWARD.score([sample], PythonCodeFlags(**limits, code_share=True)) == [0.5]


PROGRAMS = {  # use names without an import, or have names of their own that an import would hide
    "class Solution:\n    def f(self, xs: List[int], n: Optional[int] = None) -> Dict[str, Any]: return sum(xs)": 6,
    "def f(xs): return Counter(xs).most_common(1)[0][1] + len(defaultdict(int)) + len(deque(xs))": 4,
    "def f(xs): heapify(xs); heapq.heappush(xs, 9); return bisect_left(xs, 3) + bisect.bisect(xs, 0)": 2,
    "def f(xs): return reduce(lambda a, b: a + b, accumulate(xs)) + functools.reduce(max, itertools.chain(xs))": 13,
    "def f(xs): return math.gcd(*xs) + gcd(4, 6) + (inf > 3) + ceil(sqrt(5)) + pow(2, 3, 5) + min(xs)": 11,
    "@lru_cache(None)\ndef deep(n): return n and 1 + deep(n - 1)\ndef f(xs): return deep(20000)": 20000,
    "def deep(n): return n and 1 + deep(n - 1)\ndef f(xs): return deep(30000) + sys.maxsize * 0": 30000,
    "def sqrt(x): return 3\ngcd = 4\nheapq = [5]\ndef f(List): return sqrt(1) + gcd + heapq[0] + len(List)": 15,
    "def f(xs):\n    for product in xs: pass\n    return product + len(globals().keys() & {'start', 'product'})": 3,
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    "def f(xs): return A(7).x": 7,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_may_use_the_usual_names_without_imports(program, make_sample):
    call = {"fn_name": "f", "inputs": [[[1, 2, 3]]], "outputs": [PROGRAMS[program]]}
    script = {"inputs": ["1 2 3"], "outputs": [str(PROGRAMS[program])]}
    run = "\nif __name__ == '__main__': print((f if 'f' in globals() else Solution().f)([*map(int, input().split())]))"
    samples = [make_sample(block(program + run), metadata=tests) for tests in (call, script)]
    assert REWARD.score(samples, PythonCodeFlags(allow_unsandboxed_code=True)) == [1, 1]


@pytest.mark.parametrize(
    ("output", "expected", "passes"),
    [
        ("0.30000000000000004", "0.3\n", True),
        ("x = [0.30000000000000004, -2.5]; 1", "x = [0.3, -2.4999999999]; 1", True),
        ("1e-17", "0", True),
        ("3.0", "3", True),
        ("0.1\n0.2", "0.1 0.2", False),
        ("0.3", "0.301", False),
        ("100000000", "100000001", False),
        ("Total: 100000000.", "Total: 100000001.", False),
        ("0011", "11", False),
        ("1.2.3", "1.2.30", False),
        ("inf nan", "inf nan", True),
        ("inf", "1e400", False),
        ("1e400", "1e500", False),
        ("  *  \n ***\n\n", "  *\n ***", True),
        ("*\n ***", "  *\n ***", False),
        (" 0.30000000000000004", "0.3", False),
    ],
)
def test_outputs_are_compared_in_lines_with_tolerance_for_numbers(output, expected, passes):
    assert is_same_output(output, expected) is is_same_output(expected, output) is passes


@given(st.lists(st.integers() | st.floats(-1e9, 1e9)), st.lists(st.integers() | st.floats(-1e9, 1e9)))
def test_an_output_of_numbers_is_compared_as_the_values_are(one, other):
    for numbers in (other, [x + 1e-9 if isinstance(x, float) else x for x in one], [x + 1 for x in one]):
        assert is_same_output(" ".join(map(str, one)), " ".join(map(str, numbers))) == is_same(one, numbers)


HOSTILE = {
    "writes to your files": "open({victim!r}, 'w').write('x')",
    "fills the disk": "open('big', 'w').write('x' * 10_000_000)",
    "takes all memory": "x = bytearray(8 << 30)",
    "leaves processes behind": "import os\nif os.fork() == 0:\n    while True: pass\nos.setsid()\nos.abort()",
    "forks without end": "import os\nwhile True: os.fork()",
    "computes without end": "while True: pass",
    "prints without end": "while True: print('x' * 1000)",
    "ends its supervisor": "import os\nos.kill(1, 9)\nos.kill(os.getppid(), 15)\nos.abort()",
    "uses the network": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)",
    "takes its privileges back": (
        "import ctypes\nassert ctypes.CDLL(None).mount(None, b'/', None, 32, None) == 0\nopen({victim!r}, 'w')"
    ),
    "reads other processes": "open('/proc/{pid}/cmdline').read()",
    "reads your files": "open({victim!r}).read()",
    "calls a Unix socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('{folder}/socket')",
    "writes to a FIFO": "import os\nos.open({victim!r} + '.fifo', os.O_WRONLY | os.O_NONBLOCK)",
    "makes namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "takes memory in two processes": "import os, time\nos.fork()\nkept = bytearray(150 << 20)\ntime.sleep(60)",
    "takes page tables": (  # in each a page, the page of zeros
        "import ctypes, time\nread = ctypes.c_char.from_address\nmmap = ctypes.CDLL(None).mmap\n"
        "mmap.restype = ctypes.c_void_p\n"
        "mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]\n"
        "for place in range(1000, 36000):\n"
        "    if mmap(place << 30, 4096, 1, 0x100022, -1, 0) == place << 30: read(place << 30).value\n"
        "time.sleep(60)"
    ),
    "takes threads": (
        "import threading, time\nthreading.stack_size(1 << 15)\n"
        "for _ in range(50): threading.Thread(target=time.sleep, args=[60], daemon=True).start()\ntime.sleep(2)"
    ),
    "has full sockets in many processes": (
        "import os, socket, time\nfor _ in range(6):\n    if os.fork() == 0: break\n"
        "kept = bytearray(25 << 20), [socket.socketpair() for _ in range(26)]\ntime.sleep(60)"
    ),
    "changes the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'r+b', 0)",
    "computes in many processes": (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n"
        "        while time.process_time() < 0.8: pass\n        os._exit(0)\n"
        "for _ in range(6): os.wait()"
    ),
}
FAULTS = {
    "takes memory in two processes": "of memory",
    "takes page tables": "of memory",
    "has full sockets in many processes": "of memory",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_program_fails_and_changes_nothing(kind, tmp_path, isolated, short_folder):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    os.mkfifo(f"{victim}.fifo")
    fifo = os.open(f"{victim}.fifo", os.O_RDONLY | os.O_NONBLOCK)
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"{short_folder}/socket")
    unix.listen()
    with unix, os.fdopen(fifo), socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        program = HOSTILE[kind].format(
            victim=str(victim), port=listener.getsockname()[1], pid=os.getpid(), folder=short_folder
        )
        limits = Limits(seconds=1, memory=256 << 20, processes=8)
        (outcome,) = run_tests(program, [CodeTest(stdin="")], limits, isolated=True)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert outcome.result is None and FAULTS.get(kind, "") in outcome.fault and outcome.fault
    assert victim.read_text() == "mine"


KEEPING = {  # programs that print the bytes that 16 of them would have the kernel keep, though no process shows them
    "pipes": (
        "import fcntl, os\nkept = 0\nwhile True:\n"
        "    try: write = os.pipe()[1]\n    except OSError: break\n"
        "    try: fcntl.fcntl(write, 1031, 1 << 20)\n    except OSError: pass\n"
        "    os.set_blocking(write, False)\n"
        "    try:\n        while True: kept += os.write(write, bytes(4096))\n    except BlockingIOError: pass\n"
        "print(kept * 16)"
    ),
    "sockets": (
        "import socket\nkept, pairs = 0, []\nwhile True:\n"
        "    try: pairs.append(socket.socketpair())\n    except OSError: break\n"
        "    for end in pairs[-1]:\n        end.setblocking(False)\n"
        "        try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)\n        except OSError: pass\n"
        "        try:\n            while True: kept += end.send(bytes(4096))\n        except BlockingIOError: pass\n"
        "print(kept * 16)"
    ),
    "sockets that wait for a listener": (
        "import socket\nkept = 0\nlistener = socket.socket(socket.AF_UNIX)\nlistener.bind('x')\nlistener.listen(4096)\n"
        "for _ in range(300):\n    end = socket.socket(socket.AF_UNIX)\n    end.connect('x')\n"
        "    kept += end.send(bytes(100_000))\n    end.close()\nprint(kept * 16)"
    ),
    "sockets in flight": (
        "import array, socket\none, two = socket.socketpair()\n"
        "one.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])\nprint(1 << 40)"
    ),
    "empty files": (
        "import os\nkept = 0\ntry:\n    while kept < 1 << 29:\n"
        "        os.close(os.open(f'{kept}', os.O_CREAT)); kept += 1 << 11\nexcept OSError: pass\nprint(kept)"
    ),
    "full files": (
        "import os\nkept = 0\ntry:\n    while kept < 1 << 29: kept += open(f'{kept}', 'wb', 0).write(bytes(1 << 20))\n"
        "except OSError: os.remove('0')\nprint(kept * 4)"
    ),
    "files without a name": ("import os\nprint(os.write(os.memfd_create('x'), bytes(1 << 20)) * 50 * 16)"),
    "shared pages": "import mmap\nprint(len(mmap.mmap(-1, 100 << 20)) * 16)",
    "shared zeros": "import mmap, os\nprint(len(mmap.mmap(os.open('/dev/zero', os.O_RDWR), 100 << 20)) * 16)",
    "segments": "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 28, 0o1600) >= 0\nprint(1 << 30)",
    "semaphores": "import ctypes\nassert ctypes.CDLL(None).semget(0, 32000, 0o1600) >= 0\nprint(1 << 30)",
    "messages": "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1600) >= 0\nprint(1 << 30)",
    "watches": "import ctypes\nassert ctypes.CDLL(None).inotify_init() >= 0\nprint(1 << 30)",
    "timers": (
        "import ctypes\nlibc, kept = ctypes.CDLL(None), 0\n"
        "while kept < 1 << 25 and libc.timer_create(0, None, ctypes.byref(ctypes.c_long())) == 0: kept += 1 << 9\n"
        "print(kept * 16)"
    ),
    "calls of newer kernels": "import os\nos.pidfd_open(os.getpid())\nprint(1 << 30)",
}


@pytest.mark.parametrize("kind", KEEPING)
def test_what_the_kernel_keeps_for_a_program_is_bounded(kind, isolated):
    limits = Limits(seconds=4, memory=256 << 20, processes=16)
    (outcome,) = run_tests(KEEPING[kind], [CodeTest(stdin="")], limits, isolated=True)
    assert "Error" in outcome.fault if outcome.result is None else int(outcome.result) <= limits.memory


def test_pipes_processes_and_event_loops_work_in_the_sandbox(isolated):
    program = (
        "import asyncio, mmap, multiprocessing, os, shutil, subprocess, sys\n"
        "async def main(): return await asyncio.to_thread(lambda: 1)\n"
        "one, two = multiprocessing.Pipe()\n"
        "process = multiprocessing.Process(target=two.send, args=[asyncio.run(main())])\nprocess.start()\n"
        "shutil.copy('answer.py', 'copy')\n"
        "with open('copy', 'r+b') as file: text = mmap.mmap(file.fileno(), 0)[:6]\n"
        "print(one.recv(), subprocess.check_output([sys.executable, '-c', 'print(2)']), text, len(os.urandom(3)))"
    )
    (outcome,) = run_tests(program, [CodeTest(stdin="")], Limits(), isolated=True)
    assert outcome == Outcome("1 b'2\\n' b'import' 3\n")


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_test_sees_nothing_of_another(namespaces):
    if namespaces and not permitted():
        pytest.skip("this kernel permits no namespaces")
    program = "import os\nprint(sorted(os.listdir('.')))\nos.mkdir('left')\nopen('left/file', 'w').write('x')"
    for _ in range(2):
        outcomes = run_tests(program, [CodeTest(stdin="")] * 2, Limits(), isolated=namespaces)
        assert [outcome.result for outcome in outcomes] == ["['answer.py']\n"] * 2


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_has_ordinary_priority_though_its_supervisors_go_first(namespaces):
    if namespaces and not permitted():
        pytest.skip("this kernel permits no namespaces")
    program = "import os\nprint(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
    (outcome,) = run_tests(program, [CodeTest(stdin="")], Limits(), isolated=namespaces)
    assert outcome.result == f"{os.SCHED_OTHER} {max(os.getpriority(os.PRIO_PROCESS, 0), 0)}\n"


@pytest.mark.parametrize(("share", "runs", "reward"), [(False, 2, 0), (True, 3, 2 / 3)])
def test_the_first_failure_is_the_last_run_unless_the_share_counts(make_sample, monkeypatch, share, runs, reward):
    lengths = []

    def spy(*words, **named):
        lengths.append(len(run_tests(*words, **named)))

    monkeypatch.setattr("miles.tasks.rewards.built_in.python_code.run_tests", spy)
    sample = make_sample(block("print(input())"), metadata={"inputs": ["1", "2", "3"], "outputs": ["1", "1", "3"]})
    flags = PythonCodeFlags(code_share=share, allow_unsandboxed_code=True)
    assert REWARD.score([sample], flags) == [reward] and lengths == [runs]


def test_without_namespaces_the_limits_hold():
    limits = Limits(seconds=1, memory=256 << 20)
    tests = [CodeTest(stdin="7")]
    assert run_tests("print(int(input()) + 1)", tests, limits, isolated=False)[0].result == "8\n"
    assert run_tests("while True: pass", tests, limits, isolated=False)[0].result is None
    assert run_tests("x = bytearray(8 << 30)", tests, limits, isolated=False)[0].result is None


def test_without_namespaces_what_a_program_detaches_ends_with_the_sandbox():
    program = (
        "import os, socket, time\nport = int(input())\nif port and os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0:\n        kept = socket.create_connection(('127.0.0.1', port))\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\nif port: time.sleep(600)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        detached = []

        def goes_on(place, outcome):  # ends the sandbox while the second test runs
            detached.append(listener.accept()[0])
            return False

        tests = [CodeTest(stdin="0"), CodeTest(stdin=str(listener.getsockname()[1]))]
        assert len(run_tests(program, tests, Limits(seconds=60), isolated=False, goes_on=goes_on)) == 1
        detached[0].settimeout(60)
        assert detached[0].recv(1) == b""
        detached[0].close()


def test_without_namespaces_the_run_is_refused_unless_allowed(monkeypatch):
    def refuse(*_, isolated, **__):
        assert isolated
        raise SandboxRefused("new namespaces: Operation not permitted")

    monkeypatch.setattr("miles.tasks.rewards.built_in.python_code.run_tests", refuse)
    with pytest.raises(InputError, match="does not permit the sandbox .*--allow-unsandboxed-code"):
        REWARD.build(PythonCodeFlags())
    assert callable(REWARD.build(PythonCodeFlags(allow_unsandboxed_code=True)))
    monkeypatch.setattr(
        "miles.tasks.rewards.built_in.python_code.run_tests", lambda *_, **__: [Outcome(None, "exit code 1")]
    )
    with pytest.raises(InputError, match=r"an empty program fails in the sandbox \(exit code 1\)"):
        REWARD.build(PythonCodeFlags())


@given(values, values)
def test_results_are_compared_as_json(one, other):
    assert is_same(one, json.loads(json.dumps(one)))
    assert is_same(one, other) == is_same({"a": [other]}, {"a": [one]})
    assert not is_same([one, other], [one])
    assert not is_same(10**400, 0.5) and not is_same([1.5], [10**400]), "no float holds it"
    assert not is_same(1, True) and not is_same("1", 1) and is_same(1, 1.0) and is_same(0.1 + 0.2, 0.3)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"inputs": [[1]], "outputs": ["1"]},
        {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"},
        {"tests": []},
        {"tests": [3]},
        {"tests": "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\n"},  # and no check(f)
        {"tests": ["import math", "def test_it():\n    assert f(1) == 2"]},
        {"tests": "class T:\n    def test(self): assert f(1)\nif __name__ == '__main__':\n    T().test()"},
    ],
)
def test_malformed_tests_are_the_rows_fault(row):
    with pytest.raises(ValueError, match="--rm-type python_code: .*prompts.jsonl:3"):
        read_tests(Prompt("", (), None, row, "prompts.jsonl:3"))


def test_a_sandbox_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "_START_SECONDS", -1e9)
    (outcome,) = run_tests("", [CodeTest(stdin="")], Limits(), isolated=False)
    assert outcome.result is None and "took more than" in outcome.fault


@pytest.mark.parametrize(
    "code", ["check(f)", "x = f(1)", "for x in [1]:\n    assert f(x)", "raise", "f(", "with a() as b: pass"]
)
def test_statements_that_run_something_are_tests(code):
    assert read_tests(Prompt("", (), metadata={"tests": ["import math", code]}))


def test_a_right_answer_may_be_long(make_sample, isolated):
    tests = {"inputs": ["300000\n"], "outputs": ["12345678\n" * 300_000]}
    samples = [
        make_sample(block(f"print('12345678\\n' * {n}, end='')"), metadata=tests) for n in ("int(input())", 10**7)
    ]
    assert REWARD(samples) == [1, 0]


@pytest.mark.parametrize(
    "program", ["print(open('/dev/stdin').read().split()[1] == 'b')", "input(); print(input() == 'b')"]
)
def test_input_is_read_by_its_name_and_with_the_line_ends_of_windows(make_sample, isolated, program):
    tests = {"inputs": ["a\r\nb\r\n"], "outputs": ["True\r\n"]}
    assert REWARD([make_sample(block(program), metadata=tests)]) == [1]


ALWAYS_EQUAL = "class Equal{}:\n    def __eq__(self, other): return True\n    __hash__ = None\n"


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        (ALWAYS_EQUAL.format("") + "def f(x): return Equal()", 0),
        (ALWAYS_EQUAL.format("(int)") + "def f(x): return Equal(7)", 0),
        ("def f(x): return type('A', (), {'__eq__': lambda self, other: True})()", 0),
        (
            "class M(type):\n    def __eq__(cls, other): return True\n    __hash__ = type.__hash__\nf = M('A', (), {})",
            0,
        ),
        ("import builtins\nbuiltins.all = lambda values: True\ndef f(x): return 7", 0),
        ("import dataclasses as d\n@d.dataclass\nclass P:\n    x: int = 0\ndef f(x): return (P(x) == P(1)) + 1", 1),
        ("import builtins\nbuiltins.input = None\ndef f(x): return x + 1", 1),
    ],
)
def test_a_program_cannot_replace_what_statements_rely_on(make_sample, isolated, program, reward):
    tests = {"tests": ["assert all(f(x) == x + 1 for x in [1])"]}
    assert REWARD([make_sample(block(program), metadata=tests)]) == [reward]
