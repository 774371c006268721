"""An fsspec file system over a local folder whose calls fail on purpose: a network that drops, a process that dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "failing"


class FailingFileSystem(DirFileSystem):
    """``failing://run`` is the folder ``run`` in ``root``. ``before`` gets each verb and path, and may raise."""

    protocol = PROTOCOL
    root = Path()
    calls: list[tuple[str, str]] = []
    before: Callable[[str, str], None] = staticmethod(lambda verb, path: None)

    def __init__(self, **options):
        super().__init__(path=str(self.root), fs=LocalFileSystem(auto_mkdir=True))

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix(f"{PROTOCOL}://").strip("/")

    def _note(self, verb, path):
        type(self).calls.append((verb, path))
        type(self).before(verb, path)

    def put_file(self, lpath, rpath, **options):
        self._note("put", rpath)
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath, lpath, **options):
        self._note("get", rpath)
        super().get_file(rpath, lpath, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._note("pipe", path)
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(value)

    def cat_file(self, path, **options):
        self._note("cat", path)
        return super().cat_file(path, **options)

    def rm_file(self, path):
        self._note("rm", path)
        (self.root / path).unlink()

    def find(self, path, **options):
        self._note("find", path)
        return super().find(path, **options)


def register(root: Path) -> type[FailingFileSystem]:
    """Make ``failing://`` name folders in ``root``, with no failures yet."""
    FailingFileSystem.clear_instance_cache()
    FailingFileSystem.root = root
    FailingFileSystem.calls = []
    FailingFileSystem.before = staticmethod(lambda verb, path: None)
    fsspec.register_implementation(PROTOCOL, FailingFileSystem, clobber=True)
    return FailingFileSystem
