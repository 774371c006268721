"""Read what checkpoints pickle without running code that a file names.

A pickle may name any function and its arguments, and unpickling calls it. PyTorch's distributed checkpoints, which
both backends write, pickle their index ``.metadata`` and objects that are not tensors. Here only the types of such an
index are allowed; everything else in a checkpoint is loaded with ``weights_only=True``.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from miles.training.checkpoint_files import DamagedFile, in_one_line, read_bytes

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
        if module == torch.__name__ and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of miles contains")


def read_index(folder: Path) -> Metadata:
    """Return the index of the distributed checkpoint ``folder``.

    Raises:
        DamagedFile: If it cannot be unpickled from the allowed types, or describes no checkpoint.
    """
    data = read_bytes(folder, INDEX)
    try:
        index = _IndexUnpickler(io.BytesIO(data)).load()
        _check_index(index)
    except Exception as error:  # pickle documents no list of what damaged data may raise
        raise DamagedFile(f"{INDEX} is not the index of a checkpoint ({in_one_line(error)})") from None
    found: Metadata = index
    return found


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
        found = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # as above
        raise DamagedFile(f"{name} cannot be read ({in_one_line(error)})") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{name} holds no dictionary")
    return found


@contextmanager
def restricted_loading() -> Iterator[None]:
    """Have torch.distributed.checkpoint, and Megatron's loader built on it, unpickle only what is allowed.

    Neither library has a setting for it: they call ``pickle.load`` and ``torch.load(weights_only=False)``. Not for
    several threads at a time.
    """
    load_bytes = default_planner.DefaultLoadPlanner.load_bytes

    def check_first(planner: Any, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        load_bytes(planner, read_item, value)

    torch_distributed: Any = filesystem
    planner_of_torch: Any = default_planner.DefaultLoadPlanner
    unrestricted = os.environ.pop(_UNRESTRICTED, None)
    torch_distributed.pickle = SimpleNamespace(load=_load, dump=pickle.dump)
    planner_of_torch.load_bytes = check_first
    try:
        yield
    finally:
        torch_distributed.pickle = pickle
        planner_of_torch.load_bytes = load_bytes
        if unrestricted is not None:
            os.environ[_UNRESTRICTED] = unrestricted


def _load(file: IO[bytes]) -> Any:
    index = _IndexUnpickler(file).load()
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
