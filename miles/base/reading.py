"""Say in one sentence that a folder of checkpoints cannot be read: permissions, or a disk that does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reading(flag: str) -> Iterator[None]:
    """Raise ``ValueError`` that names ``flag``, the path and the reason if the block cannot read a file or folder.

    Whether there are checkpoints is not known then, so the run must not continue as if there were none.
    """
    try:
        yield
    except OSError as error:
        where = "it" if error.filename is None else str(error.filename)
        raise ValueError(
            f"{flag}: {where} cannot be read ({error.strerror or error}), so it is not known whether checkpoints are "
            "there; correct its permissions or its disk, or give another folder"
        ) from error
