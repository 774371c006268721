"""Programs that a model wrote, in a real sandbox. Needs a kernel that permits namespaces."""

import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.input_error import InputError
from miles.rewards import sandbox
from miles.rewards.built_in.python_code import REWARD, PythonCodeFlags, is_same, read_tests
from miles.rewards.sandbox import CodeTest, Limits, SandboxRefused, run_tests
from miles.sample import Prompt

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


def block(program):
    return f"<think>```python\nwrong\n```</think>\n```python\n{program}\n```\n"


def test_programs_are_run_on_every_input(make_sample, isolated):
    tests = {"inputs": ["1 2", "30 4"], "outputs": ["3\n", "34"]}
    good = block("print(sum(map(int, input().split())), ' ')")
    first_only = block("input()\nprint(3)")
    samples = [make_sample(text, metadata=tests) for text in (good, first_only, "print(3)", block("import nothing"))]
    assert REWARD(samples) == [1, 0, 0, 0]
    assert REWARD.score(samples, PythonCodeFlags(code_share=True)) == [1, 0.5, 0, 0]


def test_functions_are_called_with_arguments(make_sample, isolated):
    label = json.dumps({"fn_name": "pair", "inputs": [[1, 2], ["a", None]], "outputs": [[2, 1], [None, "a"]]})
    good = "class Solution:\n    def pair(self, a, b):\n        print('noise')\n        return (b, a)"
    cheat = "import os\ndef pair(a, b):\n    os._exit(0)"
    assert REWARD([make_sample(block(text), label) for text in (good, cheat, "pair = 3")]) == [1, 0, 0]


def test_statements_follow_the_program(make_sample, isolated):
    tests = {"tests": ["assert double(2) == 4", "assert double('a') == 'aa'"]}
    programs = ["def double(x): return 2 * x", "import sys; sys.exit(0)", "import os; os._exit(0)"]
    assert REWARD([make_sample(block(text), metadata=tests) for text in programs]) == [1, 0, 0]


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
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_program_fails_and_changes_nothing(kind, tmp_path, isolated):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        program = HOSTILE[kind].format(victim=str(victim), port=listener.getsockname()[1], pid=os.getpid())
        limits = Limits(seconds=1, memory=256 << 20, processes=8)
        (outcome,) = run_tests(program, [CodeTest(stdin="")], limits, isolated=True)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert outcome.result is None and outcome.fault
    assert victim.read_text() == "mine"


def test_one_program_sees_nothing_of_another(isolated):
    program = "import os\nprint(sorted(os.listdir('.')), os.getuid() != 0)\nopen('left', 'w').write('x')"
    outcomes = [run_tests(program, [CodeTest(stdin="")], Limits(), isolated=True)[0] for _ in range(2)]
    assert [outcome.result for outcome in outcomes] == ["['answer.py'] True\n"] * 2


def test_without_namespaces_the_limits_hold():
    limits = Limits(seconds=1, memory=256 << 20)
    tests = [CodeTest(stdin="7")]
    assert run_tests("print(int(input()) + 1)", tests, limits, isolated=False)[0].result == "8\n"
    assert run_tests("while True: pass", tests, limits, isolated=False)[0].result is None
    assert run_tests("x = bytearray(8 << 30)", tests, limits, isolated=False)[0].result is None


def test_without_namespaces_the_run_is_refused_unless_allowed(monkeypatch):
    def refuse(*_, isolated, **__):
        assert isolated
        raise SandboxRefused("new namespaces: Operation not permitted")

    monkeypatch.setattr("miles.rewards.built_in.python_code.run_tests", refuse)
    with pytest.raises(InputError, match="does not permit the sandbox .*--allow-unsandboxed-code"):
        REWARD.build(PythonCodeFlags())
    assert callable(REWARD.build(PythonCodeFlags(allow_unsandboxed_code=True)))


@given(values, values)
def test_results_are_compared_as_json(one, other):
    assert is_same(one, json.loads(json.dumps(one)))
    assert is_same(one, other) == is_same({"a": [other]}, {"a": [one]})
    assert not is_same([one, other], [one])
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
    ],
)
def test_malformed_tests_are_the_rows_fault(row):
    with pytest.raises(ValueError, match="--rm-type python_code: .*prompts.jsonl:3"):
        read_tests(Prompt("", (), None, row, "prompts.jsonl:3"))


def test_a_sandbox_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(sandbox, "_START_SECONDS", -1e9)
    (outcome,) = run_tests("", [CodeTest(stdin="")], Limits(), isolated=False)
    assert outcome.result is None and "took more than" in outcome.fault
