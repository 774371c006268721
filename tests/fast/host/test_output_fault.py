"""An error of standard output is recognized among others, and ends a command with one sentence."""

import errno
import subprocess
import sys

from miles.host.output_fault import fault_of_output


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
