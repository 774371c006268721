"""An error of standard output is recognized among others, and ends a command with one sentence."""

import errno
import subprocess
import sys

from miles.base.disk_faults import fault_of_output


def test_an_error_of_another_file_is_not_blamed_on_the_output():
    assert fault_of_output(OSError(errno.ENOSPC, "No space left on device")) is None
    assert fault_of_output(FileNotFoundError(errno.ENOENT, "No such file")) is None
    assert fault_of_output(KeyError("x")) is None


def test_a_command_whose_output_is_full_ends_with_one_sentence():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "miles", "completion", "bash"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "miles: error: standard output cannot be written (No space left on device)\n"


def test_a_pipe_that_is_not_the_output_is_not_blamed_on_it():
    """As the connection of a worker, whose error the launcher raises as a BrokenPipeError too."""
    code = """
import errno, sys
from miles.base.disk_faults import fault_of_output
print(fault_of_output(BrokenPipeError(errno.EPIPE, "Broken pipe")))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == "None\n"


def test_a_pipe_that_nobody_reads_is_a_fault_of_the_output():
    code = """
import sys
from miles.base.disk_faults import fault_of_output
sys.stdin.read()
try:
    print("x", flush=True)
except BrokenPipeError as error:
    print(fault_of_output(error), file=sys.stderr)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "standard output was closed\n"
