"""Read and write through torch.distributed.checkpoint: without running code of a file; to the disk, or into memory.

With ``--async-save`` the ranks agree on the contents of the files and copy them into memory (``StagedFiles``), which
needs collective operations and the device. A thread writes them to the disk, which needs neither. So training continues
meanwhile, and the files are the same as without the flag.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from miles.base.attributes import set_within
from miles.training.checkpoint_files import DamagedFile, in_one_line, random_state_of, read_bytes, write_through

# Read what checkpoints pickle without running code that a file names.
#
# A pickle may name any function and its arguments, and unpickling calls it. PyTorch's distributed checkpoints, which
# both backends write, pickle their index ``.metadata`` and objects that are not tensors. Here only the types of such
# an index are allowed; everything else in a checkpoint is loaded with ``weights_only=True``.


INDEX = ".metadata"
_UNRESTRICTED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # makes torch.load unpickle anything by default
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # written by Python 3.13
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class("pathlib" if module == "pathlib._local" else module, name)
        if module == torch.__name__ and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of miles contains")


def read_index(folder: Path) -> Metadata:
    """Return the index of the distributed checkpoint ``folder``.

    Raises:
        DamagedFile: If it cannot be unpickled from the allowed types, or describes no checkpoint.
    """
    data = read_bytes(folder, INDEX)
    try:
        return _load(io.BytesIO(data))
    except Exception as error:  # pickle documents no list of what damaged data may raise
        raise DamagedFile(f"{INDEX} is not the index of a checkpoint ({in_one_line(error)})") from None


def check_files_of_index(folder: Path, index: Metadata) -> None:
    """Check that the files that ``index`` refers to are there, and long enough. Raises ``DamagedFile``."""
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise DamagedFile(f"{name} is missing") from None
        if size < end:
            fault = f"truncated ({size} bytes, at least {end} were saved)"
            raise DamagedFile(f"{name} is {fault if size else 'empty'}")


def read_tensors(folder: Path, name: str) -> dict[str, Any]:
    """Return the dictionary of tensors and plain values that ``torch.save`` wrote. Raises ``DamagedFile``."""
    data = read_bytes(folder, name)
    try:
        tensors = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # as above
        raise DamagedFile(f"{name} cannot be read ({in_one_line(error)})") from None
    if not isinstance(tensors, dict):
        raise DamagedFile(f"{name} holds no dictionary")
    return tensors


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Have torch.distributed.checkpoint, and Megatron's loader built on it, unpickle only allowed types.

    Neither library has a setting for it: they call ``pickle.load`` and ``torch.load(weights_only=False)``. Not for
    several threads at once.
    """
    load_bytes = default_planner.DefaultLoadPlanner.load_bytes

    def check_first(planner: Any, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        load_bytes(planner, read_item, value)

    unrestricted = os.environ.pop(_UNRESTRICTED, None)
    restricted = SimpleNamespace(load=_load, dump=pickle.dump)
    try:
        with (
            set_within(filesystem, pickle=restricted),
            set_within(default_planner.DefaultLoadPlanner, load_bytes=check_first),
        ):
            yield
    finally:
        if unrestricted is not None:
            os.environ[_UNRESTRICTED] = unrestricted


def _load(file: IO[bytes]) -> Metadata:
    index: Metadata = _IndexUnpickler(file).load()
    _check_index(index)
    return index


def _check_index(index: Any) -> None:
    """Check types, and that the index refers to files inside the checkpoint only."""
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise ValueError("it holds no Metadata")
    for key, described in index.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(described, TensorStorageMetadata | BytesStorageMetadata):
            raise ValueError("it has a malformed entry")
    if not isinstance(index.storage_data, dict):
        raise ValueError("it refers to no files")
    for place in index.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError("it refers to a file outside of the checkpoint")
        if type(place.offset) is not int or type(place.length) is not int or place.offset < 0 or place.length < 0:
            raise ValueError("it refers to a place that no file has")


class StagedFiles(FileSystem):
    """torch's file system, whose files stay in memory until they are written. Folders are made on the disk."""

    def __init__(self) -> None:
        self._contents: dict[Path, _Content] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # as torch's own: any file
        """Yield an empty file; closing it keeps its content."""
        assert mode == "wb", "a checkpoint is written, and not read"
        content = self._contents[Path(path)] = _Content()
        yield content

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file is there, or on the disk."""
        return Path(path) in self._contents or super().exists(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        self._contents[Path(new_path)] = self._contents.pop(Path(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Forget a file."""
        del self._contents[Path(path)]

    def write(self) -> None:
        """Write the files to the disk one by one, and free the memory of each. Raises ``OSError``."""
        for path in list(self._contents):
            content = self._contents.pop(path)
            write_through(path, content.take())


class _Content(io.BufferedIOBase):
    """The written bytes, in the pieces in which they came: one growing buffer would be copied again and again."""

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


class StagingWriter(FileSystemWriter):
    """torch's writer of a checkpoint, into ``staged`` if given, else to the disk."""

    def __init__(self, folder: str | Path, staged: StagedFiles | None = None, **options: Any) -> None:
        super().__init__(folder, sync_files=staged is None, **options)
        if staged is not None:
            self.fs = staged


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


# The random state of a rank in a checkpoint: ``random_state_rank*.pt``.


def write_random_state(folder: Path, more: dict[str, torch.Tensor] | None = None) -> None:
    """Write the states of PyTorch's generators, and ``more`` of the backend's own by name. Every rank calls it."""
    state = {"cpu": torch.get_rng_state(), **(more or {})}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_through(folder / random_state_of(dist.get_rank()), buffer.getvalue())


def restore_random_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read what ``write_random_state`` wrote; returns ``more``. Every rank calls it.

    A rank that the saving run did not have keeps its own seed, and gets nothing. Raises ``ValueError`` for a damaged
    file.
    """
    name = random_state_of(dist.get_rank())
    if not (folder / name).exists():
        return {}
    try:
        state: dict[str, torch.Tensor] = read_tensors(folder, name)
        torch.set_rng_state(state.pop("cpu"))
        cuda = state.pop("cuda", None)
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)
    except (DamagedFile, KeyError, RuntimeError, TypeError, AttributeError) as error:
        fault = error if isinstance(error, DamagedFile) else f"{name} holds no random state"
        raise ValueError(f"--load: the checkpoint {folder} is damaged: {fault}; give another one") from None
    return state
