"""``python -m miles COMMAND``: the command ``miles``, also without an installed script."""

import sys

from miles.cli import main

if __name__ == "__main__":
    sys.exit(main())
