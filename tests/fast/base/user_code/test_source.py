"""A name that a module certainly lacks is found in its source; in doubt it may be there."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from miles.base.text import InputError
from miles.base.user_code import LARGEST, import_function, missing_name, read_names

BINDS = [
    "def score(): ...",
    "async def score(): ...",
    "class score: ...",
    "score = 1",
    "score: int",
    "a, (score, *b) = f()",
    "if torch:\n    def score(): ...",
    "try:\n    from fast import score\nexcept ImportError:\n    score = None",
    "from fast import other as score",
    "import fast as score",
    "import score.fast",
    "for score in range(3): ...",
    "with f() as score: ...",
    "while (score := f()): ...",
    "match f():\n    case [1, *score]: ...",
    "match f():\n    case {'a': 1, **score}: ...",
    "match f():\n    case int() as score: ...",
    "def f():\n    global score\n    score = 1",
    "class A:\n    global score\n    score = 1",
]
MAY_BIND = [
    "from fast import *",
    "def __getattr__(name): ...",
    "__getattr__, __dir__ = attach(f, {})",
    "globals()['sco' + 're'] = 1",
    "globals().update(f())",
    "def f():\n    vars()[name] = 1",
    "exec(text)",
    "eval(text)",
    "import builtins\nbuiltins.exec(text)",
    "import sys\nsys.modules[__name__] = f()",
    "from sys import modules",
    "import me\nsetattr(me, name, 1)",
    "import me\nme.score = 1",
    "import me\nme.__dict__[name] = 1",
    "register('score')",
    "IntEnum._convert_('A', __name__, str.isupper)",
    "module = __name__",
    "def score(:",
    "\0",
    "#" * LARGEST + "\n",
]
LACKS = [
    "",
    "def scores(): ...",
    "class A:\n    def score(self): ...\n    score = 1",
    "def f(score):\n    score = 1\n    def score(): ...",
    "f(score=score)",
    "# def score(): ...",
    "'''def score(): ...'''",
    "if __name__ == '__main__':\n    f()",
    "import logging\nlogger = logging.getLogger(__name__)",
    "class A:\n    def __getattr__(self, name): ...",
    "def f(model):\n    model.eval()",
    "import re\npattern = '\\d'",
]


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, name="rewards_of_mine"):
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return name

    return write


@pytest.mark.parametrize("text", BINDS + MAY_BIND)
def test_a_name_that_may_be_there_is_not_missed(module, text):
    assert missing_name(module(text), "score", "function") is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", LACKS)
def test_a_name_that_is_nowhere_is_missed(module, text):
    assert missing_name(module(text), "score", "function").startswith("module rewards_of_mine has no function score; ")


def test_the_message_is_that_of_the_import_with_a_near_name(module):
    name = module("def scores(): ...")
    with pytest.raises(InputError) as caught:
        import_function(f"{name}:score", "--flag")
    message = missing_name(name, "score", "function")
    assert message == f"module {name} has no function score; did you mean scores? define it there or fix the name"
    assert str(caught.value) == f"--flag {name}:score: {message.replace('did you mean scores? ', '')}"


def test_a_module_without_a_source_may_have_any_name(module):
    for name in ("no_such_module", "no_such_module.part", "time", "x" * 5000):
        assert missing_name(name, "score", "function") is None


def test_a_module_of_a_package_is_found_and_the_package_not_imported(module):
    module("raise RuntimeError('was imported')", "package_of_mine.__init__")
    assert missing_name(module("a = 1", "package_of_mine.part"), "score", "function")
    assert missing_name("package_of_mine", "score", "function")


def test_one_of_several_modules_of_a_name_is_enough(module, tmp_path, monkeypatch):
    name = module("a = 1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{name}.py").write_text("def score(): ...")
    assert missing_name(name, "score", "function")
    monkeypatch.syspath_prepend(tmp_path / "other")
    assert missing_name(name, "score", "function") is None


def test_what_an_imported_module_has_is_there(module, monkeypatch):
    name = module("a = 1")
    imported = ModuleType(name)
    imported.score = len
    monkeypatch.setitem(sys.modules, name, imported)
    assert missing_name(name, "score", "function") is None


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["every fourth", "all"])
def test_nothing_that_modules_of_python_have_is_missed(share):
    checked = 0
    for name, imported in list(sys.modules.items())[::share]:
        file = getattr(imported, "__file__", None)
        if name.partition(".")[0] not in sys.stdlib_module_names or not str(file).endswith(".py"):
            continue
        names = read_names(Path(file))
        if names is None:
            continue
        has = {key for key, value in vars(imported).items() if callable(value) and not key.startswith("__")}
        assert has <= names.bound | names.mentioned, name
        checked += 1
    assert checked > 50 / share
