"""Bring a Python function to the processes of a run: by its import path, or in a file.

A process of a run imports a function of a module. A lambda, a function inside a function, one of a script or a notebook
(``__main__``), and one of a module that only this process finds have no path that works there. These are written to a
file with all that they need, by cloudpickle, which Ray brings along.
"""

import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ray import cloudpickle

from miles.base.user_code import PICKLED


def function_path(function: Callable[..., Any], folder: Path, argument: str) -> str:
    """Return a path for ``load_function``: ``module:name``, or ``FILE:name`` of a file that is written to ``folder``.

    Args:
        function: A function, or an object that can be called.
        folder: Where to write the file. Its name has a hash of its content, so that no other run replaces it.
        argument: What to call the function in an error.

    Raises:
        ValueError: The function holds something that cannot be sent to another process.
    """
    name = str(getattr(function, "__name__", type(function).__name__)).strip("<>")
    module = sys.modules.get(str(getattr(function, "__module__", None)))
    if module is not None and getattr(module, name, None) is function and _is_importable_everywhere(module.__name__):
        return f"{module.__name__}:{name}"
    with ExitStack() as registered:
        if module is not None and module.__name__ != "__main__" and not _is_importable_everywhere(module.__name__):
            cloudpickle.register_pickle_by_value(module)
            registered.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            content: bytes = cloudpickle.dumps(function)
        except Exception as error:  # cloudpickle raises the errors of the objects
            raise ValueError(
                f"{argument} {name}: cannot be sent to the process that runs it ({error}); create what it needs inside "
                "the function, or put it at the top of a module that can be imported"
            ) from error
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}{PICKLED}"
    file.write_bytes(content)
    return f"{file}:{name}"


def _is_importable_everywhere(module: str) -> bool:
    """Return whether the processes of a run find a module: installed, or in the working folder or ``PYTHONPATH``."""
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    installed = [*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()]
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    spec = PathFinder.find_spec(top, [os.getcwd(), *paths, *installed])
    return spec is not None or top in sys.builtin_module_names or top == "miles"
