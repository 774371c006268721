"""``python -m miles COMMAND``: the command ``miles``, also without an installed script."""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() handles it: Ctrl-C shows no traceback of the imports

from miles.cli import main

if __name__ == "__main__":
    sys.exit(main())
