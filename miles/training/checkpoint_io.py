"""Write through torch.distributed.checkpoint: to the disk at once, or into memory; its errors as one sentence.

With ``--async-save`` the ranks agree on the contents of the files and copy them into memory (``StagedFiles``), which
needs collective operations and the device. A thread writes them to the disk, which needs neither. So training continues
meanwhile, and the files are the same as without the flag.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from miles.training.checkpoint_files import DamagedFile, in_one_line, write_through
from miles.training.restricted_pickle import check_files_of_index, read_index, restricted_loading


class StagedFiles:
    """Files of a checkpoint that are complete in memory."""

    def __init__(self) -> None:
        self._contents: dict[Path, _Content] = {}

    def create(self, path: Path) -> io.BufferedIOBase:
        """Return an empty file; closing it keeps its content."""
        content = self._contents[path] = _Content()
        return content

    def holds(self, path: Path) -> bool:
        """Return whether a file is there."""
        return path in self._contents

    def rename(self, path: Path, new: Path) -> None:
        """Give a file another name."""
        self._contents[new] = self._contents.pop(path)

    def remove(self, path: Path) -> None:
        """Forget a file."""
        del self._contents[path]

    def write(self) -> None:
        """Write the files to the disk one by one, and free the memory of each. Raises ``OSError``."""
        for path in list(self._contents):
            content = self._contents.pop(path)
            write_through(path, content.take())


class _Content(io.BufferedIOBase):
    """What was written, in the pieces in which it came: one growing buffer would be copied again and again."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._size += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._size

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Keep the content: torch closes a file when it is complete."""

    def take(self) -> Iterator[bytes]:
        """Yield the pieces, and free each."""
        while self._pieces:
            yield self._pieces.popleft()


class _InMemory(FileSystem):
    """torch's file system, whose files stay in memory. Folders are made on the disk."""

    def __init__(self, staged: StagedFiles) -> None:
        self._staged = staged

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # as torch's own: any file
        assert mode == "wb", "a checkpoint is written, and not read"
        yield self._staged.create(Path(path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._staged.holds(Path(path)) or super().exists(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._staged.rename(Path(path), Path(new_path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._staged.remove(Path(path))


class StagingWriter(FileSystemWriter):
    """torch's writer of a checkpoint, into ``staged`` if given, else to the disk."""

    def __init__(self, folder: str | Path, staged: StagedFiles | None = None, **given: Any) -> None:
        super().__init__(folder, sync_files=staged is None, **given)
        if staged is not None:
            self.fs = _InMemory(staged)


@contextmanager
def save_errors(folder: Path) -> Iterator[None]:
    """Raise ``OSError`` that names the rank and the reason if a rank cannot write into ``folder``."""
    try:
        yield
    except CheckpointException as error:
        rank, failure = _first(error)
        fault = f"rank {rank} could not write {folder}: {type(failure).__name__}: {in_one_line(failure)}"
        number = (failure.errno,) if isinstance(failure, OSError) and failure.errno is not None else ()
        raise OSError(*number, fault) from error


def checked_index(folder: Path, flag: str) -> Metadata:
    """Return the index of ``folder``, whose files are there.

    The launcher compares files with the manifest, and does not read the index: this process has imported torch.

    Raises:
        ValueError: The index is not one, or files that it refers to are missing or cut. The message names the file.
    """
    try:
        index = read_index(folder)
        check_files_of_index(folder, index)
    except DamagedFile as fault:
        raise ValueError(f"{flag}: the checkpoint {folder} is damaged: {fault}; give another one") from None
    return index


@contextmanager
def loading(folder: Path, flag: str) -> Iterator[None]:
    """Have the block load ``folder``, whose index is checked, without running what its files name.

    Raises:
        ValueError: A rank cannot read it. The message names ``flag``, the checkpoint and the reason.
    """
    try:
        with restricted_loading():
            yield
    except CheckpointException as error:
        rank, failure = _first(error)
        if isinstance(failure, OSError | UnpicklingError):
            raise ValueError(
                f"{flag}: the checkpoint {folder} cannot be read (rank {rank}: {type(failure).__name__}: "
                f"{in_one_line(failure)}); give another one"
            ) from error
        raise ValueError(
            f"{flag}: the checkpoint {folder} does not hold this model (rank {rank}: {type(failure).__name__}: "
            f"{in_one_line(failure)}); give one that was saved with the same model and heads"
        ) from error
    except (OSError, UnpicklingError, AttributeError) as error:  # the last is Megatron's without its common.pt
        raise ValueError(
            f"{flag}: the checkpoint {folder} cannot be read ({type(error).__name__}: {in_one_line(error)}); give "
            "another one"
        ) from error


def _first(error: CheckpointException) -> tuple[int, BaseException]:
    rank, (failure, _) = next(iter(error.failures.items()))
    return rank, failure
