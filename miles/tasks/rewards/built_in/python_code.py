"""``--rm-type python_code``: whether a Python program that the model wrote passes tests, in a sandbox."""

import ast
import builtins
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from math import isclose, isfinite
from textwrap import dedent
from typing import Any

from miles.base import strict_json
from miles.base.flags import flag
from miles.base.text import InputError
from miles.tasks.rewards.answer_text import last_code_block, reference_object
from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.sandbox import CodeTest, Limits, Outcome, SandboxRefused, run_tests
from miles.tasks.rewards.subprocess_call import in_parallel
from miles.types.sample import Prompt, Sample

TOLERANCE = 1e-6  # relative or absolute, between numbers with a fraction
_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?!\w|\.\w)")


@dataclass(frozen=True)
class PythonCodeFlags:
    """python_code: the flags of ``--rm-type python_code``."""

    code_share: bool = flag(False, "reward of --rm-type python_code: the share of tests passed, not 1 for all of them")
    code_seconds: int = flag(
        4,
        "seconds of processor time that the processes of a program may take per test (8 times as many of wall time; N "
        "tests together N + 8 times as many)",
        at_least=1,
    )
    code_memory: float = flag(1.0, "GiB that the processes of a program may use together", above=0)
    code_processes: int = flag(16, "processes and threads that a program may have at once", at_least=1)
    allow_unsandboxed_code: bool = flag(
        False, "run the model's programs without namespaces: with limits, but also with the network and your files"
    )


class PythonCode(Reward[PythonCodeFlags]):
    """1 if the program passes all tests, else 0; the share of tests with ``--code-share``.

    Without ``--code-share`` the first test that fails is the last one that is run.

    The program is the last block of code marked ``python`` or ``py``, else the last without a mark, after the
    reasoning; none scores 0. It may use the names of ``prelude`` without importing them. The metadata or the label
    holds the tests, in one of three forms:

    - ``inputs`` and ``outputs``: texts for standard input, and the output of each. White space at the ends of lines
      does not count, that at their starts does; numbers with a fraction are the same up to ``TOLERANCE``.
    - ``fn_name``, ``inputs`` and ``outputs``: lists of arguments, and the result of the function for each, which may
      be in a list of its own.
    - ``tests``: statements that follow the program, such as ``assert f(2) == 4``; one text, or a list. They run in the
      program's own process, so a program that sets out to can forge their success: prefer the other forms.

    ``sandbox.py`` states the restrictions of a program. If the kernel permits no namespaces, the run stops, unless
    ``--allow-unsandboxed-code`` is given.
    """

    name = "python_code"
    summary = "1 if the program in the answer passes all tests, in a sandbox"
    data = "metadata or label: `inputs` and `outputs` (and `fn_name`), or `tests`"
    needs_label = False
    limit = "`--code-seconds` per test"
    own_flags = PythonCodeFlags

    def build(self, flags: PythonCodeFlags) -> Callable[[Sequence[Sample]], Rewards | Awaitable[Rewards]]:
        """Return the scoring function, after a first program has run.

        Raises:
            InputError: The kernel does not permit the sandbox.
        """
        if not flags.allow_unsandboxed_code:
            try:
                (outcome,) = run_tests("", [CodeTest(stdin="")], Limits(seconds=30), isolated=True)
            except SandboxRefused as error:
                raise InputError(
                    f"--rm-type python_code: this machine does not permit the sandbox ({error}); permit user "
                    f"namespaces (sysctl user.max_user_namespaces, the container's seccomp profile), or give "
                    f"--allow-unsandboxed-code if the programs may use the network and your files"
                ) from error
            if outcome.result is None:
                raise InputError(
                    f"--rm-type python_code: an empty program fails in the sandbox ({outcome.fault}); use a Python "
                    f"whose files are below its sys.prefix, or give --allow-unsandboxed-code"
                )
        return super().build(flags)

    def check_prompt(self, prompt: Prompt, flags: PythonCodeFlags) -> None:
        """Check that the row has tests."""
        read_tests(prompt)

    def score(self, samples: Sequence[Sample], flags: PythonCodeFlags) -> Rewards:
        """Run the programs."""
        return in_parallel(partial(_score, flags=flags), samples)


def _score(sample: Sample, flags: PythonCodeFlags) -> float:
    tests, expected = read_tests(sample.prompt)
    program = last_code_block(sample.response, "python", "py")
    if program is None:
        return 0.0
    if program.lstrip("\n")[:1].isspace():  # indented further than its fence
        program = dedent(program)
    longest = Limits.file_bytes + max(len(json.dumps(result)) for result in expected)
    limits = Limits(flags.code_seconds, int(flags.code_memory * 2**30), flags.code_processes, longest)
    passed: list[bool] = []

    def goes_on(place: int, outcome: Outcome) -> bool:
        passed.append(_passes(outcome, tests[place], expected[place]))
        return passed[-1] or bool(flags.code_share)

    isolated = not flags.allow_unsandboxed_code
    names = prelude("\n".join([program, *(test.code for test in tests)]))
    run_tests(program, tests, limits, isolated=isolated, prelude=names, goes_on=goes_on)
    return sum(passed) / len(tests) if flags.code_share else float(sum(passed) == len(tests))


def _passes(outcome: Outcome, test: CodeTest, expected: Any) -> bool:
    if outcome.result is None:
        return False
    if test.stdin is not None:
        return is_same_output(outcome.result, expected)
    if test.function:
        try:
            result = strict_json.loads(outcome.result)
        except ValueError:
            return False
        is_wrapped = isinstance(expected, list) and len(expected) == 1  # as rows of APPS and TACO have it
        return is_same(result, expected) or (is_wrapped and is_same(result, expected[0]))
    return True


def is_same_output(one: str, other: str) -> bool:
    r"""Return whether two outputs are the same but for blanks at the ends of lines, and numbers as in ``is_same``.

    >>> is_same_output("[0.30000000000000004, 1] \n", "[0.3, 1]"), is_same_output("  3", "3")
    (True, False)
    """
    lines, others = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (one, other))
    return len(lines) == len(others) and all(map(_is_same_line, lines, others))


def _is_same_line(one: str, other: str) -> bool:
    if one == other:
        return True
    pieces, others = _NUMBER.split(one), _NUMBER.split(other)
    return len(pieces) == len(others) and all(map(_is_same_piece, pieces, others))


def _is_same_piece(one: str, other: str) -> bool:
    if one == other:
        return True
    if not (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)) or _is_whole(one) and _is_whole(other):
        return False
    numbers = float(one), float(other)
    return all(map(isfinite, numbers)) and is_same(*numbers)


def _is_whole(number: str) -> bool:
    return number.lstrip("+-").isdigit()


def is_same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same; numbers with a fraction up to ``TOLERANCE``.

    >>> is_same([1, 0.1 + 0.2], [1, 0.3]), is_same(1, True)
    (True, False)
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        try:
            return numbers and isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except OverflowError:  # a whole number that no float holds
            return False
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and bool(one == other)


def read_tests(prompt: Prompt) -> tuple[list[CodeTest], list[Any]]:
    """Return the tests of a prompt, and the result that each expects.

    Raises:
        ValueError: There are none, or they are malformed.
    """
    row = reference_object(prompt, "python_code", "inputs", "tests")
    if "inputs" not in row:
        codes = row["tests"] if isinstance(row["tests"], list) else [row["tests"]]
        if not codes or not all(isinstance(code, str) for code in codes):
            raise _refused(prompt, "tests must be a text of statements, or a list of them, not empty")
        if not any(map(_runs_something, codes)):
            raise _refused(prompt, "tests call and assert nothing, so every program passes; add a call, as check(f)")
        return [CodeTest(code=code) for code in codes], [""] * len(codes)
    inputs, outputs, function = row["inputs"], row.get("outputs"), row.get("fn_name")
    if not isinstance(inputs, list) or not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _refused(prompt, "inputs and outputs must be lists of one length, not empty")
    if function:
        if not isinstance(function, str) or not all(isinstance(arguments, list) for arguments in inputs):
            raise _refused(prompt, "with fn_name, each of inputs must be the list of arguments")
        return [CodeTest(function=function, arguments=a) for a in inputs], json.loads(json.dumps(outputs))
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise _refused(prompt, "inputs and outputs must be texts; give fn_name if they are arguments")
    return [CodeTest(stdin=text.replace("\r\n", "\n")) for text in inputs], outputs


def _runs_something(code: str) -> bool:
    """Return whether statements call or assert something, outside of definitions and of a main program."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no program passes
        return True
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for statement in statements:
        if isinstance(statement, definitions):
            continue
        nodes = list(ast.walk(statement))
        is_main = any(isinstance(node, ast.Name) and node.id == "__name__" for node in nodes)
        if not is_main and any(isinstance(node, ast.Call | ast.Assert | ast.Raise) for node in nodes):
            return True
    return False


def _refused(prompt: Prompt, fault: str) -> ValueError:
    return ValueError(f"--rm-type python_code: the tests of the prompt {prompt.source}: {fault}; correct the row")


# Names that programs use without an import, as the graders of LiveCodeBench, APPS and TACO provide them.

# Of a name that several have, the last counts; a module's own name goes before those in modules.
_ALL_NAMES_OF = (
    *("typing", "string", "re", "datetime", "copy", "random", "statistics", "operator", "io", "json", "sys"),
    *("fractions", "decimal", "collections", "heapq", "bisect", "math", "itertools", "functools"),
)
_MODULES = (*_ALL_NAMES_OF, "os", "time")
_WORD = re.compile(r"[^\W\d]\w*")


def prelude(program: str) -> str:
    r"""Return the import statements, a line each, for the words of ``program`` that graders define.

    >>> prelude("def total(xs: List[int]): return math.fsum(xs)")
    'from typing import List\nfrom math import fsum\nimport math'
    """
    words = set(_WORD.findall(program))
    if "np." not in program:
        words.discard("np")  # a usual name for a number, and numpy is slow to import
    return "\n".join(statement for name, statement in _statements().items() if name in words)


@cache
def _statements() -> dict[str, str]:
    """Return the import statement for each name; never one that would hide a built-in name, such as ``pow``."""
    statements = {}
    for module in _ALL_NAMES_OF:
        imported = import_module(module)
        for name in getattr(imported, "__all__", vars(imported)):
            # one letter is an abbreviation of a flag of re, and a usual name for a number
            if not name.startswith("_") and not hasattr(builtins, name) and (len(name) > 1 or module == "math"):
                statements[name] = f"from {module} import {name}"
    statements |= {module: f"import {module}" for module in _MODULES}
    if find_spec("numpy"):
        statements["np"] = "import numpy as np"
    return statements
