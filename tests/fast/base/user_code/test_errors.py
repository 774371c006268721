"""A function that a flag names raises ordinary exceptions: others would end an event loop or an actor."""

import asyncio
import inspect
import sys
import types

import pytest

from miles.base.text import InputError
from miles.base.user_code import UserCodeError, load_function


class Awaited:
    """An object whose ``__call__`` is a coroutine function."""

    async def __call__(self, error):
        raise error


def plain(error):
    raise error


async def coroutine(error):
    raise error


class Source:
    pass


@pytest.fixture(autouse=True)
def module(monkeypatch):
    names = {"plain": plain, "coroutine": coroutine, "instance": Awaited(), "Source": Source}
    module = types.ModuleType("functions_of_the_user")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def called(name, error):
    """Call a function in a task of an event loop, as a rollout does."""

    async def call():
        result = load_function(f"functions_of_the_user:{name}", "--x")(error)
        return await result if inspect.isawaitable(result) else result

    return asyncio.run(call())


@pytest.mark.parametrize("error", ["ValueError", "ImportError", "SystemExit"])
def test_a_module_that_raises_is_named_in_a_short_line(tmp_path, monkeypatch, error):
    (tmp_path / "raises_at_import.py").write_text(f"raise {error}('x' * 10**7 + '\\x1b[2J')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="^--x raises_at_import:f: ") as caught:
        load_function("raises_at_import:f", "--x")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


NAMES = ["plain", "coroutine", "instance"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_what_would_end_the_event_loop_is_an_error_that_names_the_function(name, error):
    with pytest.raises(UserCodeError, match=rf"^--x functions_of_the_user:{name}: raised {type(error).__name__}"):
        called(name, error)


@pytest.mark.parametrize("name", NAMES)
def test_no_stop_iteration_is_passed_on(name):
    with pytest.raises((UserCodeError, RuntimeError), match="StopIteration"):
        called(name, StopIteration())


@pytest.mark.parametrize("name", NAMES)
def test_other_errors_arrive_as_they_are(name):
    error = KeyError("k")
    with pytest.raises(KeyError) as caught:
        called(name, error)
    assert name != "plain" or caught.value is error


def test_signatures_kinds_and_classes_are_kept():
    loaded = load_function("functions_of_the_user:coroutine", "--x")
    assert inspect.signature(loaded) == inspect.signature(coroutine) and inspect.iscoroutinefunction(loaded)
    assert not inspect.iscoroutinefunction(load_function("functions_of_the_user:plain", "--x"))
    assert load_function("functions_of_the_user:Source", "--x") is Source


def test_a_coroutine_that_is_closed_ends():
    async def waits():
        await asyncio.Event().wait()

    sys.modules["functions_of_the_user"].waits = waits
    running = load_function("functions_of_the_user:waits", "--x")()

    async def close():
        task = asyncio.ensure_future(running)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(close())


@pytest.mark.parametrize("status", ["", "0", "'usage: reward.py FILE'"])
def test_a_module_that_exits_when_it_is_imported_is_refused(tmp_path, monkeypatch, status):
    """As a program without ``if __name__ == "__main__"``: this process would end, with status 0 perhaps."""
    (tmp_path / "program_of_the_user.py").write_text(f"import sys\nsys.exit({status})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(InputError, match=r"^--x program_of_the_user:f: module program_of_the_user exits when it is"):
        load_function("program_of_the_user:f", "--x")
