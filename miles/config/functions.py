"""Name the user's functions that flags name, and check that each has the form of an import path, and a source."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import miles
from miles.base.flags import LONGEST_VALUE, Errors, flag_name
from miles.base.text import one_line
from miles.base.user_code import PICKLED, missing_name, module_files
from miles.config.settings import SECTIONS, Settings, section_of
from miles.tasks.environments.chosen import FLAG as ENVIRONMENT
from miles.tasks.environments.chosen import read_choice


@dataclass(frozen=True)
class UserFunction:
    """Describe the function that a flag names.

    Attributes:
        signature: The function to write.
        runs: Where it runs, and when.
        changes: The data that it may change.
        arguments: With how many arguments it is called, if a start imports it and checks that (inputs.py).
    """

    signature: str
    runs: str
    changes: str
    arguments: int | None = None


_TABLE = tomllib.loads((files(__package__) / "functions.toml").read_text(encoding="utf-8"))
HOOKS = {name: UserFunction(**row) for name, row in _TABLE.items()}


def names_functions(settings: Settings) -> bool:
    """Return whether the command names a function of the user's."""
    return any(True for _ in user_functions(settings))


def user_functions(settings: Settings) -> Iterator[tuple[str, UserFunction, str]]:
    """Yield each field that names a function of the user's, the function's description, and its import path."""
    for field, hook in HOOKS.items():
        path = getattr(getattr(settings, section_of()[field]), field)
        if path is not None:
            yield field, hook, path


def explain_functions(settings: Settings) -> Iterator[str]:
    """Yield a line for each function of the user's."""
    for field, hook, path in user_functions(settings):
        yield f"{flag_name(field)} {path}: runs in {hook.runs}; it may change {hook.changes}"


def check_function_paths(settings: Settings, errors: Errors) -> None:
    """Check that each flag that names a function has the form of an import path, and a source that has the function.

    Its module is imported later.
    """
    for field, flag, path, kind in _named_functions(settings):
        if not errors.none_about(field):
            continue
        module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
        if module.endswith(PICKLED) and name:
            continue
        fault = _fault_of_form(path, module, name, kind) or missing_name(module, name, kind)
        if fault is not None:
            errors.add(f"{flag} {one_line(path, LONGEST_VALUE)}: {fault}")


def _named_functions(settings: Settings) -> Iterator[tuple[str, str, str, str]]:
    """Yield each field that has an import path, the flag as a message shows it, the path, and its kind."""
    for field, hook, path in user_functions(settings):
        yield field, flag_name(field), path, "class" if hook.signature.startswith("class") else "function"
    environment = settings.rollout.environment
    if environment is None:
        return
    try:
        choice = read_choice(environment)
    except ValueError:  # ``check_agents`` reports it
        return
    if choice is None:
        yield "environment", ENVIRONMENT, environment, "class"
        return
    kind, options = choice
    for option, named in kind.imports.items():
        if options[option]:
            yield "environment", f"{ENVIRONMENT} {kind.name}:{option}", str(options[option]), named


def _fault_of_form(path: str, module: str, name: str, kind: str) -> str | None:
    """Return the fault of an import path on its own, and what to do."""
    of_file = re.fullmatch(r"(?:\./)?([\w/]+)\.py(?:[:.](\w+))?", path)
    if of_file is not None and not (of_file[2] and has_source(path)):  # else a module whose name is py
        meant = f"{of_file[1].strip('/').replace('/', '.')}:{of_file[2] or 'NAME'}"
        return (
            f"names a file, and a {kind} is imported from a module; write {meant}, and start the run in the folder "
            "from which that is importable"
        )
    if all(part.isidentifier() for part in (*module.split("."), name)):
        return None
    return f"names no {kind} of a module; write module:{kind} or module.{kind}"


def has_source(path: str) -> bool:
    """Return whether the module of ``path`` is a file of this package or of the folder where the run starts."""
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    return any(module_files(module, [Path.cwd(), Path(miles.__file__).parent.parent]))


# Show the settings of a run to functions of the user's, as they expect them: attributes with the names of flags.

CUSTOM_CONFIG = "--custom-config-path"
LARGEST_CONFIG = 1_000_000  # characters of its file


def flags_view(settings: Settings) -> SimpleNamespace:
    """Return every setting by its flag's name (``args.n_samples_per_prompt``), and what ``--custom-config-path`` adds.

    Of Megatron's own flags those are there that the command gives. Flags of SGLang's servers are passed on unread, so
    they are not. It is a copy: a function that changes it changes nothing in the run.
    """
    path = settings.rollout.custom_config_path
    values = {} if path is None else read_custom_config(path)
    for name, section in SECTIONS.items():
        values |= {field.name: getattr(getattr(settings, name), field.name) for field in fields(section)}
    return SimpleNamespace(**values | dict(settings.megatron_overrides))


def read_custom_config(path: str) -> dict[str, Any]:
    """Return the keys and values of the file of ``--custom-config-path``.

    Raises:
        ValueError: It cannot be read, or is not an object of YAML; the message names the flag.
    """
    import yaml  # few commands have such a file

    label = f"{CUSTOM_CONFIG} {one_line(path, LONGEST_VALUE)}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        fault = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is not UTF-8 text"
        raise ValueError(f"{label}: {fault}; check the path") from error
    if len(text) > LARGEST_CONFIG:
        raise ValueError(f"{label}: has more than {LARGEST_CONFIG} characters; check the path")
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = one_line(str(getattr(error, "problem", error)), LONGEST_VALUE)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{label}: is not YAML ({reason}{line}); correct it there") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{label}: holds no object; write one setting per line, as name: value")
    return values
