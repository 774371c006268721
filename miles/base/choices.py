"""Find the choices of a flag: one file each in a folder, one class per file.

``--advantage-estimator`` chooses from ``objective/estimators/``, ``--policy-loss`` from ``objective/policy_losses/``,
``--loss-type`` from ``objective/loss_types/``, ``--rm-type`` from ``rewards/built_in/``. To add a choice, add a file;
nothing else names it. Validation reads these files, so they import torch, numpy and other slow libraries for types
only, or inside the functions that compute.
"""

import importlib
import inspect
import pkgutil
from abc import ABC
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar, cast

from miles.base.flags import Errors, changed, flag_name

F = TypeVar("F")  # the flags of a choice: an instance of its ``own_flags``, or None


class Choice(ABC, Generic[F]):
    """One choice of a flag. Objects have no state; ``flags`` are those that the choice declares.

    Attributes:
        flag: The field of the section that chooses.
        name: The value of the flag.
        summary: A few words for ``--help``.
        reads: The flags that it reads, by default all of ``own_flags``. A flag that others read and this one does not
            has no effect.
        instead: What to use instead of a flag that asks for the same behavior in another way. Such a flag is refused.
        own_flags: A frozen dataclass of flags, declared in the same file. It becomes a part of the section.
    """

    flag: ClassVar[str]
    name: str
    summary: str
    reads: tuple[str, ...] = ()
    instead: Mapping[str, str] = {}
    own_flags: ClassVar[type | None] = None

    def __init_subclass__(cls) -> None:
        """Read the flags that the class declares, unless it names others."""
        super().__init_subclass__()
        if cls.own_flags is not None and "own_flags" in vars(cls) and "reads" not in vars(cls):
            cls.reads = tuple(field.name for field in fields(cls.own_flags))

    @cache  # noqa: B019 - choices and sections live as long as the process
    def flags_of(self, section: Any) -> F:
        """Return its own flags, with the values that they have in the run's section."""
        if self.own_flags is None:
            return cast(F, None)
        values = {field.name: getattr(section, field.name) for field in fields(self.own_flags)}
        return cast(F, self.own_flags(**values))


C = TypeVar("C", bound=Choice[Any])


def _is_defined_in(module: ModuleType, value: object, kind: type) -> bool:
    """Return whether the module defines ``value`` as a ``kind`` that is not abstract."""
    is_kind = isinstance(value, type) and issubclass(value, kind) and not inspect.isabstract(value)
    return is_kind and value.__module__ == module.__name__


class Registry(dict[str, C]):
    """The choices of a flag by name."""

    def __init__(self, package: str, kind: type[C]) -> None:
        """Import every file of ``package`` and its folders but ``base``, and make the ``kind`` that each defines.

        Raises:
            TypeError: If a file defines no class of this kind, or more than one, apart from abstract ones.
            ValueError: If two classes have the same name.
        """
        super().__init__()
        self.flag = kind.flag
        folder = importlib.import_module(package)
        files = pkgutil.walk_packages(folder.__path__, f"{package}.")
        names = [file.name for file in files if not file.ispkg and file.name != f"{package}.base"]
        for name in sorted(names, key=lambda name: name.rpartition(".")[2]):
            module = importlib.import_module(name)
            classes = [value for value in vars(module).values() if _is_defined_in(module, value, kind)]
            if len(classes) != 1:
                raise TypeError(f"{module.__name__} must define one {kind.__name__}, not {len(classes)}")
            choice = classes[0]()
            if choice.name in self:
                raise ValueError(f"{module.__name__}: there is a {kind.__name__} named {choice.name} already")
            self[choice.name] = choice

    def __missing__(self, name: str) -> C:
        """Raise ``ValueError``: there is no choice of this name."""
        raise ValueError(f"{flag_name(self.flag)} {name}: no such choice; give one of {', '.join(self)}")

    @property
    def own_flags(self) -> tuple[type, ...]:
        """The dataclasses of flags that the files declare, each once, and after those that it extends."""
        classes = dict.fromkeys(choice.own_flags for choice in self.values() if choice.own_flags is not None)
        return tuple(sorted(classes, key=lambda flags: len(flags.__mro__)))

    @property
    def help(self) -> str:
        """What every choice does, for the help text of the flag."""
        return "; ".join(f"{name}: {choice.summary}" for name, choice in self.items())

    @property
    def reads(self) -> tuple[str, ...]:
        """The flags that any of the choices reads, each once."""
        return tuple(dict.fromkeys(flag for choice in self.values() for flag in choice.reads))

    def readers(self, flag: str) -> list[str]:
        """Return the names of the choices that read ``flag``."""
        return [name for name, choice in self.items() if flag in choice.reads]

    def check_instead(self, chosen: C, flags: Any, errors: Errors) -> None:
        """Refuse every flag that is set and for which ``chosen`` has another with the same purpose."""
        for name in changed(flags, [name for name in chosen.instead if name not in chosen.reads]):
            rule = f"contradicts {flag_name(self.flag)} {chosen.name}, which does not read it"
            errors.refuse(name, getattr(flags, name), rule, f"{chosen.instead[name]}, or drop it")
