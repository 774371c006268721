"""The command ``miles``: pick a subcommand by name and run it.

Subcommands are the modules of ``miles/commands/``. Only the chosen one is imported, so that ``miles --help`` and wrong
flags need no torch.
"""

import ast
import difflib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import miles
from miles import commands
from miles.base.disk_faults import fault_of_output
from miles.base.quick_import import import_transformers_quickly
from miles.base.text import one_line, program
from miles.commands import command_names

# Answer Ctrl-C before a run listens to signals itself (run/stop_requests.py): one sentence, and status 130.
#
# During an import, a ``KeyboardInterrupt`` can be lost in a callback, or end in a traceback of the import.


STATUS = 128 + signal.SIGINT


@contextmanager
def ending_at_ctrl_c(last_line: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once, with ``last_line`` on stderr; for a block that has nothing to clean up."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{last_line}\n".encode(errors="backslashreplace"))
        os._exit(STATUS)

    with _handling(end):
        yield


@contextmanager
def raising_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` in the block, as Python does by default."""
    with _handling(signal.default_int_handler):
        yield


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Handle SIGINT in the block, unless it is ignored, as in a job in the background. Other threads cannot."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    former = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


LONGEST_NAME = 80  # of a command that does not exist, in a message


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``miles COMMAND ARGUMENTS…`` and return the exit status.

    Args:
        argv: The words after ``miles``; the process's own if None.
    """
    _print_anywhere()
    import_transformers_quickly()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            with ending_at_ctrl_c(_last_line(words)):
                return _run(words)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if (fault := fault_of_output(error)) is None:
            raise
        if not isinstance(error, BrokenPipeError):  # as after `| head`, which is no mistake
            print(f"miles: error: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(_last_line(words), file=sys.stderr)
        return STATUS


def _run(words: Sequence[str]) -> int:
    """Print the usage or the version, or run a subcommand; return the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"miles {miles.__version__}")
        return 0
    name, *rest = words
    if name not in command_names():
        name = one_line(name, LONGEST_NAME).strip() or "''"
        near = difflib.get_close_matches(name, command_names(), n=1)
        what_to_do = f"did you mean {near[0]}?" if near else f"give one of {', '.join(command_names())}"
        print(f"miles: error: {name}: no such command; {what_to_do}", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except OSError as error:
        print(f"miles: error: the current folder is gone ({error.strerror}); change to another one", file=sys.stderr)
        return 2
    module = importlib.import_module(f"{commands.__name__}.{name.replace('-', '_')}")
    handling = nullcontext() if name == "train" else raising_at_ctrl_c()  # others may have something to clean up
    with _printing_help(rest), handling:
        status: int = module.main(rest)
    return status


@contextmanager
def _printing_help(words: Sequence[str]) -> Iterator[None]:
    """Print what argparse prints if the words ask for help: argparse hides that it could not be written."""
    own_words = words[: words.index("--")] if "--" in words else words  # the others are of another command
    if not {"-h", "--help", "--version"} & {*own_words}:
        yield
        return
    text = io.StringIO()
    try:
        with redirect_stdout(text):
            yield
    finally:
        print(text.getvalue(), end="", flush=True)


def _last_line(words: Sequence[str]) -> str:
    """Return the line that is printed when Ctrl-C ends the command. A run reports it itself (run/failures.py)."""
    if words[:1] == ["train"]:
        return f"{program()}: stopped by SIGINT; no run was active"
    return f"{' '.join(['miles', *words[:1]])}: stopped by SIGINT"


def _print_anywhere() -> None:
    """Print a character that the terminal's encoding lacks as an escape, instead of stopping at it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _usage() -> str:
    lines = ["usage: miles COMMAND [--flag value ...]", "", "commands:"]
    lines += [f"  {name:14} {_summary(name)}" for name in command_names()]
    return "\n".join(
        [*lines, "", "miles COMMAND --help lists the flags of a command; miles --version prints the version"]
    )


def _summary(name: str) -> str:
    """Return the first line of a command's docstring, read without importing the command."""
    source = Path(commands.__path__[0], f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
