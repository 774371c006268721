"""The environment that ``--environment`` names: a built-in environment with its options, or a class of the user's."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from miles.base.text import InputError
from miles.base.user_code import load_function
from miles.tasks.environments.base import EnvironmentKind, EnvironmentMaker, read_options
from miles.tasks.environments.built_in import ENVIRONMENTS

FLAG = "--environment"


def read_choice(text: str) -> tuple[EnvironmentKind, Mapping[str, Any]] | None:
    """Return the built-in environment that ``text`` names with its options; None if it is an import path.

    Raises:
        InputError: The name or an option is unknown.
    """
    name, colon, settings = text.partition(":")
    if name not in ENVIRONMENTS:
        if "." in text or (colon and settings and "=" not in settings):
            return None
        near = get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"{FLAG} {text}: no such environment; {hint}the built-in ones are {', '.join(ENVIRONMENTS)}; for your own "
            "give module:class"
        )
    kind = ENVIRONMENTS[name]
    options = read_options(settings, f"{FLAG} {text}")
    for option in options:
        if option not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise InputError(f"{FLAG} {text}: {name} has no option {option}; it has {known}")
    return kind, {**kind.options, **options}


def environment_maker(text: str) -> EnvironmentMaker:
    """Return the maker of an environment for each trajectory.

    Raises:
        InputError: The environment or a library is not there, or an option is wrong.
    """
    choice = read_choice(text)
    if choice is None:
        return load_function(text, FLAG)
    kind, options = choice
    for library in kind.libraries:
        module, _, install = library.partition(" ")
        if find_spec(module) is None:
            raise InputError(f"{FLAG} {text}: the package {module} is not installed; install it {install}")
    return kind.maker(options)
