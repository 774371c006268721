"""Import transformers without reading its files once more.

At each import, transformers 5.19 reads the 1,600 files of its models twice for the names in them
(``import_utils.define_import_structure``), and the metadata of all installed packages: 1.5 of the 5 s that the import
of a model takes on one core. The result is the same until a package is installed, so the first process stores it.
"""

import hashlib
import importlib.metadata
import marshal
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from miles.base.cache import store, stored

_READER = "transformers.utils.import_utils"


class StoredResults:
    """The results of an earlier process with the same packages, by name; further ones are stored."""

    def __init__(self) -> None:
        folders = [entry for entry in sys.path if entry.endswith("-packages") and os.path.isdir(entry)]
        folders += [folder for entry in folders if os.path.isdir(folder := os.path.join(entry, "transformers/models"))]
        self._packages = repr([sys.version, *((folder, os.stat(folder).st_mtime_ns) for folder in folders)])
        self._name = f"transformers-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]}"
        self._results: dict[str, bytes] = {}
        with suppress(ValueError, EOFError, TypeError):  # nothing is stored, or it is damaged
            packages, results = marshal.loads(stored(self._name) or b"")
            if packages == self._packages:
                self._results = results

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return a result, which the caller may change."""
        if name not in self._results:
            self._results[name] = marshal.dumps(compute())
            store(self._name, marshal.dumps((self._packages, self._results)))
        return marshal.loads(self._results[name])


class _Loader(SourceFileLoader):
    """Executes the module that reads the files, and puts what is known in place of its readers."""

    def exec_module(self, module: ModuleType) -> None:
        known = StoredResults()
        read_packages = importlib.metadata.packages_distributions

        def packages() -> Any:
            return known.get("packages", lambda: dict(read_packages()))

        importlib.metadata.packages_distributions = packages
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = read_packages
        read_structure = vars(module).get("define_import_structure")
        if read_structure is None:  # another version, in the environment of a server
            return

        def structure(module_path: str | Path, prefix: str | None = None) -> Any:
            path = Path(module_path)
            if path.name != "models" and path.parent.name != "models":  # one family, which is few files
                return read_structure(module_path, prefix)
            return known.get(f"{path} {prefix}", lambda: read_structure(module_path, prefix))

        vars(module)["define_import_structure"] = structure


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module that reads the files, with our loader."""
        spec = PathFinder.find_spec(fullname, path) if fullname == _READER else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


_FINDER = _Finder()


def import_transformers_quickly() -> None:
    """Let a later import of transformers in this process, or a fork of it, use what is known."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
