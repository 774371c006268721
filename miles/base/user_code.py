"""Code of the user's: import it, look for its names, and call it. What it raises arrives as an ordinary exception.

``StopIteration`` that reaches a future hangs its waiter. ``SystemExit`` or ``KeyboardInterrupt`` ends an event loop,
and a worker of Ray, which is then reported as dead.
"""

import ast
import asyncio
import functools
import importlib
import inspect
import os
import pickle
import sys
import threading
import tokenize
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from symtable import symtable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from miles.base.text import InputError, name_and_words, one_line, words_of
from miles.base.threads import in_thread, start_in_thread

_LONGEST = 300


class UserCodeError(Exception):
    """User code raised something that is not an ``Exception``, or ``StopIteration``. The cause is that exception."""


def as_exception(error: BaseException, origin: str = "") -> Exception:
    """Return ``error`` if it is ordinary, else a ``UserCodeError`` that states what ``origin`` raised."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = UserCodeError(f"{origin} raised {one_line(name_and_words(error), _LONGEST)}".lstrip())
    wrapped.__cause__ = error
    return wrapped


@contextmanager
def ordinary_errors(origin: str) -> Iterator[None]:
    """Run user code in this context, and it raises ordinary exceptions only. A cancellation passes unchanged.

    Raises:
        UserCodeError: Instead of ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` and the like, and instead
            of ``CancelledError`` if nobody has cancelled the task that runs.
    """
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        ordinary = as_exception(error, origin)
        if ordinary is error:
            raise
        raise ordinary from error


def _is_cancelled() -> bool:
    """Return whether somebody has cancelled the task that runs, if one does."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


def raising_exceptions(function: Callable[..., Any], origin: str) -> Callable[..., Any]:
    """Return ``function`` in ``ordinary_errors``. A class is returned unchanged.

    ``function`` may be a coroutine function, or an object whose ``__call__`` is one.
    """
    if inspect.isclass(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with ordinary_errors(origin):
            result = function(*args, **named)
        return awaited(result) if inspect.isawaitable(result) else result

    async def awaited(result: Awaitable[Any]) -> Any:
        with ordinary_errors(origin):
            return await result

    @functools.wraps(function)
    async def coroutine(*args: Any, **named: Any) -> Any:
        return await call(*args, **named)

    return coroutine if inspect.iscoroutinefunction(function) else call


# Functions named on the command line: in a module, or in a file that miles.train has written.


PICKLED = ".pkl"  # suffix of a file with one function, and its dependencies (run/function_file.py)


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """Import a function as ``import_function`` does; when called, it raises ordinary exceptions only."""
    return raising_exceptions(import_function(path, flag), f"{flag} {path}:")


def import_function(path: str, flag: str) -> Callable[..., Any]:
    """Import ``module:function`` or ``module.function``; the working directory is importable.

    ``FILE.pkl:name`` is the function in that file. Like a module, such a file runs code of whoever wrote it.

    Raises ``InputError`` naming ``flag``, the path given and its fault.
    """
    function: Callable[..., Any] = load_object(path, flag, "function")
    return function


def load_object(path: str, flag: str, kind: str = "object") -> Any:
    """Import the object that ``path`` names, as ``load_function`` does; ``kind`` names its kind in errors."""
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
        what_to_do = "install that, or correct the import"
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):  # the module itself is absent
            what_to_do = "check the spelling, or start the run from the folder that holds it"
        fault = f"cannot import module {module_name} ({one_line(words_of(error), 300)})"
        raise InputError(f"{flag} {path}: {fault}; {what_to_do}") from error
    except ValueError as error:  # of the module's code: it would be shown as our own sentence
        raise InputError(f"{flag} {path}: module {module_name} raised {_words(error)}; correct it") from error
    except SystemExit as error:  # it would end this process too, with the status of a success perhaps
        raise InputError(
            f"{flag} {path}: module {module_name} exits when it is imported ({_words(error)}); put what it "
            'does as a program under if __name__ == "__main__"'
        ) from error
    named = getattr(module, name, None)
    if named is None or (kind == "function" and not callable(named)):
        raise InputError(f"{flag} {path}: {no_such_name(module_name, name, kind)}")
    return named


def fault_of_signature(function: Callable[..., Any], arguments: int) -> str | None:
    """Return the fault of a function that cannot be called with so many arguments, with its file and line."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of one in C
        return None
    try:
        signature.bind(*range(arguments))
    except TypeError:
        inner = inspect.unwrap(function)
        code = getattr(inner, "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""
        amount = "one argument" if arguments == 1 else f"{arguments} arguments"
        name = getattr(inner, "__name__", "it")
        return f"{where}its signature is {name}{signature}, and it is called with {amount}; change it"
    return None


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


# Look for a name in the source of a module. An import would run the module, which may take long or need a GPU.


LARGEST = 2**18  # characters of a source that is read: parsing them takes about 0.2 s

# What can bind names of a module that no statement of its source binds.
_BINDING_NAMES = frozenset(("globals", "locals", "vars", "exec", "eval", "setattr", "builtins", "__builtins__"))
_BINDING_ATTRIBUTES = frozenset(("modules", "f_globals", "__globals__", "__dict__"))  # as in sys.modules


def missing_name(module: str, name: str, kind: str) -> str | None:
    """Return the fault if ``module`` certainly has no ``name``; None if it has one, or in doubt.

    In doubt are a module whose source is not found, and one that may bind the name while it runs: by a star import,
    ``__getattr__``, ``globals()`` and the like. If several folders have a module of that name, one with the name is
    enough.

    Args:
        module: A module's name, with dots.
        name: The name of the attribute.
        kind: The kind of object for the message: function, class.
    """
    if hasattr(sys.modules.get(module), name):
        return None
    folders = [Path.cwd(), Path(__file__).parents[2], *map(Path, sys.path)]
    sources = [read_names(file) for file in module_files(module, dict.fromkeys(folders))]
    if not sources or any(names is None or name in names.bound | names.mentioned for names in sources):
        return None
    near = get_close_matches(name, {name for names in sources if names is not None for name in names.bound}, n=1)
    return no_such_name(module, name, kind, f"did you mean {near[0]}? " if near else "")


def module_files(module: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the source files of modules of this name in ``folders``."""
    parts = module.split(".")
    for folder in folders:
        for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if os.path.isfile(file):  # unlike Path.is_file, false for a name that is too long
                yield file


@dataclass(frozen=True)
class Names:
    """Names in a source.

    Attributes:
        bound: Those that its statements bind in the module, also if they run only in some cases.
        mentioned: Texts, and names of attributes that are set; code may bind them.
    """

    bound: set[str]
    mentioned: set[str]


def read_names(file: Path) -> Names | None:
    """Return the names in a source; None if it cannot be read, or may bind any name while it runs."""
    try:
        with tokenize.open(file) as source:
            text = source.read(LARGEST + 1)
        if len(text) > LARGEST:
            return None
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts
            tree, symbols = ast.parse(text), symtable(text, str(file), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    bound = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported() or s.is_declared_global()}
    mentioned = set[str]()
    if "__getattr__" in bound:
        return None
    ordinary = set(_ordinary_module_names(tree))
    for node in ast.walk(tree):
        if _may_bind_any(node) or (isinstance(node, ast.Name) and node.id == "__name__" and node not in ordinary):
            return None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            mentioned.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned.add(node.value)
    return Names(bound, mentioned)


def _may_bind_any(node: ast.AST) -> bool:
    if isinstance(node, ast.alias):
        return node.name == "*" or node.name in _BINDING_NAMES | _BINDING_ATTRIBUTES
    if isinstance(node, ast.Attribute):
        return node.attr in _BINDING_ATTRIBUTES
    return isinstance(node, ast.Name) and node.id in _BINDING_NAMES


def _ordinary_module_names(tree: ast.Module) -> Iterator[ast.Name]:
    """Yield the uses of ``__name__`` that hand the module to nobody who could set its attributes."""
    for node in ast.walk(tree):
        used: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            used = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
            used = node.args
        yield from (part for part in used if isinstance(part, ast.Name) and part.id == "__name__")


# Run reward functions and other user code so that nothing it does can stop or hang the rollout side.
#
# A call of a function has a daemon thread to itself until it returns (``miles/base/threads.py``). A coroutine runs on
# one event loop that all such calls share and nothing else uses: a blocking call in it delays only them. It needs no
# thread while it waits, so many more calls of coroutine functions are made at once. Whatever a function raises arrives
# as an ordinary exception: a ``StopIteration`` that reaches a future would hang its waiter, and a ``SystemExit`` or
# ``KeyboardInterrupt`` would end the event loop.


MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)  # calls of one kind at once, as in asyncio.to_thread
MAX_COROUTINES = 256  # calls of coroutine functions at once; each may have a connection open

T = TypeVar("T")


class UserCodeTimeout(Exception):
    """User code did not return in time."""


async def call_user_code(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return ``function(*args)``, awaited if it is awaitable.

    Args:
        function: A function, a coroutine function, or an object with either as ``__call__``.
        args: Its arguments.
        seconds: The longest time to wait; 0 waits without a limit. A thread that does not return is left behind, as
            Python cannot stop it; a coroutine is cancelled.

    Raises:
        UserCodeTimeout: If the function does not return within ``seconds``.
        UserCodeError: If it raises ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` or the like.
        Exception: Any other exception that it raises.
    """
    async with call_slots(makes_coroutines(function)):
        call = UserCall(function, args)
        try:
            async with asyncio.timeout(seconds or None):
                return await asyncio.wrap_future(call.outcome)
        except TimeoutError:
            if call.outcome.done() and not call.outcome.cancelled():  # the function raised it
                raise
            raise UserCodeTimeout(f"did not return within {seconds:g} s") from None
        finally:
            call.abandon()


async def run_blocking(function: Callable[..., T], /, *args: Any, **named: Any) -> T:
    """Return ``function(*args, **named)`` from a daemon thread, once fewer than ``MAX_THREADS`` such calls are awaited.

    For what trajectories call: tools, and what blocks in an environment. A call that is cancelled, as by
    ``--agent-timeout``, leaves its thread behind and makes room for another.

    Raises:
        UserCodeError: If it raises ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` or the like.
        Exception: Any other exception that it raises.
    """
    slots = _slots(_blocking_slots, MAX_THREADS)
    with _while_waiting.get()():
        await slots.acquire()
    try:
        return await user_code_in_thread(function, *args, **named)
    finally:
        slots.release()


@contextmanager
def while_waiting(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Make ``run_blocking`` enter ``context()`` while it waits for a thread, in tasks that this block creates."""
    token = _while_waiting.set(context)
    try:
        yield
    finally:
        _while_waiting.reset(token)


_while_waiting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "_while_waiting", default=nullcontext
)


async def user_code_in_thread(function: Callable[..., T], /, *args: Any, **named: Any) -> T:
    """Return ``function(*args, **named)`` from a daemon thread, which is there at once, whatever other calls do.

    For user code that the rollout process itself awaits, such as hooks on an iteration.

    Raises:
        UserCodeError: If it raises ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` or the like.
        Exception: Any other exception that it raises.
    """
    return await in_thread(_call, function, args, named)


def _call(function: Callable[..., T], args: tuple[Any, ...], named: dict[str, Any]) -> T:
    with ordinary_errors("a function of the user's"):
        return function(*args, **named)


def makes_coroutines(function: Callable[..., Any]) -> bool:
    """Return whether a call of ``function`` only makes a coroutine, and so does not need a thread."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class UserCall:
    """One call, in a thread that it has to itself unless it only makes a coroutine, and its outcome."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.outcome: Future[Any] = Future()
        self._function = function
        self._args = args
        self._coroutine: Future[Any] | None = None
        self._abandoned = False
        if makes_coroutines(function):
            self._coroutine = asyncio.run_coroutine_threadsafe(_ordinary(function, args), _shared_loop())
            self._coroutine.add_done_callback(lambda coroutine: self._settle(coroutine.result))
        else:
            start_in_thread(lambda: self._settle(self._returned))

    def abandon(self) -> None:
        """Cancel a coroutine that is still running."""
        self._abandoned = True
        if self._coroutine is not None:
            self._coroutine.cancel()

    def _returned(self) -> Any:
        result = self._function(*self._args)
        if not inspect.isawaitable(result):
            return result
        self._coroutine = asyncio.run_coroutine_threadsafe(_ordinary(lambda: result), _shared_loop())
        if self._abandoned:
            self._coroutine.cancel()
        return self._coroutine.result()

    def _settle(self, result: Callable[[], Any]) -> None:
        """Make what ``result`` returns or raises the outcome."""
        try:
            settle = partial(self.outcome.set_result, result())
        except BaseException as error:
            settle = partial(self.outcome.set_exception, as_exception(error))
        if self.outcome.set_running_or_notify_cancel():  # False if the caller waits no longer
            settle()


async def _ordinary(function: Callable[..., Awaitable[Any]], args: tuple[Any, ...] = ()) -> Any:
    """Return the awaited result of a call; an error that is no ``Exception`` must not reach the event loop."""
    with ordinary_errors(""):
        return await function(*args)


def _shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which the coroutines of user code run, in a daemon thread."""
    with _making_loop:  # two first calls at the same time would make two: a client of a server belongs to one
        return _only_loop()


_making_loop = threading.Lock()


@cache
def _only_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="user-code-loop", daemon=True).start()
    return loop


_Slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]  # they bound the calls at once
_thread_slots: _Slots = WeakKeyDictionary()
_coroutine_slots: _Slots = WeakKeyDictionary()
_blocking_slots: _Slots = WeakKeyDictionary()


def limit_calls(share: Callable[[int], int]) -> None:
    """Limit the calls of reward functions at once on the running event loop to this process's ``share`` of them."""
    loop = asyncio.get_running_loop()
    _thread_slots[loop] = asyncio.Semaphore(share(MAX_THREADS))
    _coroutine_slots[loop] = asyncio.Semaphore(share(MAX_COROUTINES))


def call_slots(coroutines: bool) -> asyncio.Semaphore:
    """Return the semaphore of the running event loop which bounds the calls of reward functions at once.

    Args:
        coroutines: Whether the function makes coroutines (``makes_coroutines``).
    """
    return _slots(_coroutine_slots, MAX_COROUTINES) if coroutines else _slots(_thread_slots, MAX_THREADS)


def _slots(slots: _Slots, number: int) -> asyncio.Semaphore:
    return slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(number))
