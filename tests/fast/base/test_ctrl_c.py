"""Ctrl-C is handled in a block, and as before after it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from miles.cli import STATUS, ending_at_ctrl_c, raising_at_ctrl_c

ENDS = """
import os, signal
from miles.cli import ending_at_ctrl_c
with ending_at_ctrl_c("stopped"):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        print("an exception")
"""


def test_the_process_ends_with_the_sentence():
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (STATUS, "", "stopped\n")


def test_an_inner_block_may_raise_and_the_handler_is_restored():
    former = signal.getsignal(signal.SIGINT)
    with ending_at_ctrl_c("stopped"):
        with pytest.raises(KeyboardInterrupt), raising_at_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) != former
    assert signal.getsignal(signal.SIGINT) == former


def test_a_signal_that_is_ignored_stays_ignored():
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with raising_at_ctrl_c():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, former)


def test_another_thread_leaves_the_signal_alone():
    handlers = []

    def use():
        with ending_at_ctrl_c("stopped"):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
