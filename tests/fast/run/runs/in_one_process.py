"""``train.py`` without Ray and in one process, for runs whose numbers a test compares."""

import sys

from miles.commands.train import in_one_process

in_one_process(sys.argv[1:])
