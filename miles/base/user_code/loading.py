"""Functions named on the command line: in a module, or in a file that miles.train has written."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.base.input_error import InputError
from miles.base.one_line import name_and_words, one_line, words_of
from miles.base.user_code.errors import raising_exceptions

PICKLED = ".pkl"  # suffix of a file with one function, and what it needs (run/function_file.py)


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """Import a function as ``import_function`` does; when called, it raises ordinary exceptions only."""
    return raising_exceptions(import_function(path, flag), f"{flag} {path}:")


def import_function(path: str, flag: str) -> Callable[..., Any]:
    """Import ``module:function`` or ``module.function``; the working directory is importable.

    ``FILE.pkl:name`` is the function in that file. Like a module, such a file runs code of whoever wrote it.

    Raises ``InputError`` naming ``flag``, the path given and what is wrong with it.
    """
    function: Callable[..., Any] | None = load_object(path, flag, "function")
    if not callable(function):
        module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
        raise InputError(f"{flag} {path}: {no_such_name(module_name, name, 'function')}")
    return function


def load_object(path: str, flag: str, kind: str = "object") -> Any:
    """Import what ``path`` names, as ``load_function`` does; ``kind`` says what it is in errors."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise InputError(f"{flag} {path}: not an import path; write module:{kind} or module.{kind}")
    if module_name.endswith(PICKLED):
        return _unpickled(path, Path(module_name), flag)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"{flag} {path}: cannot import module {module_name} ({one_line(words_of(error), 300)}); "
            "check the spelling, or start the run from the folder that holds it"
        ) from error
    except ValueError as error:  # of the module's code: it would be shown as a sentence of ours
        raise InputError(f"{flag} {path}: module {module_name} raised {_words(error)}; correct it") from error
    except SystemExit as error:  # it would end this process too, with the status of a success perhaps
        raise InputError(
            f"{flag} {path}: module {module_name} exits when it is imported ({_words(error)}); put what it "
            'does as a program under if __name__ == "__main__"'
        ) from error
    if getattr(module, name, None) is None:
        raise InputError(f"{flag} {path}: {no_such_name(module_name, name, kind)}")
    return getattr(module, name)


def no_such_name(module: str, name: str, kind: str, hint: str = "") -> str:
    """Return the error of a module without ``name``, and what to do."""
    return f"module {module} has no {kind} {name}; {hint}define it there or fix the name"


def _words(error: BaseException) -> str:
    return one_line(name_and_words(error), 300)


def _unpickled(path: str, file: Path, flag: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = pickle.loads(file.read_bytes())
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot read {file} ({error.strerror}); check the path") from error
    except (Exception, SystemExit) as error:  # whatever the code in it raises
        raise InputError(
            f"{flag} {path}: cannot be loaded in this process ({_words(error)}); use the environment that wrote it"
        ) from error
    if not callable(function):
        raise InputError(f"{flag} {path}: holds no function; give a file that miles.train has written")
    return function
