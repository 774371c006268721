"""Run a server process: ``python -m miles.engine.servers.child PARENT_PID MODULE ARGUMENTS…``.

It asks the kernel to kill the process with its parent, reads the arguments with secrets from a pipe, and becomes the
module. This file imports the standard library and a few files like it, because servers may run in another environment.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

from miles.base.processes import die_with_parent
from miles.base.quick_import import import_transformers_quickly
from miles.base.stacks import answer_requests

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    answer_requests()
    import_transformers_quickly()
    sys.argv = [*sys.argv[2:], *json.load(sys.stdin)]
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
