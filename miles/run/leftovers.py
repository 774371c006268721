"""List what killed runs of this user left on this machine, and remove it: ``python -m miles.run.leftovers``.

A launcher that starts removes the same (run_guard.py). Runs that are alive, and files of others, are left alone.
"""

import argparse
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from miles.run.local_access import private_session_root
from miles.run.run_guard import LOCK, clean_up, locked, members, stale_folders


@dataclass(frozen=True)
class Leftover:
    """The leftovers of one run.

    Attributes:
        folder: Its folder of temporary files.
        size: The bytes in it.
        pids: The processes that are left of it.
        removed: Whether all of it was removed.
    """

    folder: str
    size: int
    pids: list[int]
    removed: bool = False


def leftovers(root: Path, clean: bool) -> tuple[list[Leftover], int]:
    """Return the leftovers of runs in ``root``, and how many runs are alive there.

    Args:
        root: The folder of this user's runs (``private_session_root``).
        clean: Whether to remove it.
    """
    entries = []
    with locked(root / LOCK):  # no launcher makes its folder meanwhile
        total = len(list(root.glob(f"*/{LOCK}")))
        for folder in stale_folders(root):
            left = Leftover(str(folder), _size(folder), [process.pid for process in members(str(folder))])
            if clean:
                with suppress(OSError):  # the answer states that it is still there
                    clean_up(folder)
                left = Leftover(left.folder, left.size, left.pids, not folder.exists())
            entries.append(left)
    return entries, total - len(entries)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            total += path.lstat().st_size
    return total


def main() -> None:
    """Print the leftovers and the number of live runs as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", action="store_true", help="remove them")
    entries, alive = leftovers(private_session_root(), parser.parse_args().clean)
    print(json.dumps({"leftovers": [asdict(left) for left in entries], "alive": alive}))


if __name__ == "__main__":
    main()
