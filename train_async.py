"""Train as ``train.py`` does, and generate an iteration ahead of the trainer, unless ``--async-steps`` is set.

Scripts of related launchers call this file for that: ``python train_async.py --flags…``.
"""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() handles it: Ctrl-C shows no traceback of the imports

from miles.cli import main

if __name__ == "__main__":
    words = sys.argv[1:]
    is_given = any(word.split("=")[0] == "--async-steps" for word in words)
    sys.exit(main(["train", *([] if is_given else ["--async-steps", "1"]), *words]))
