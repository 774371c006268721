"""The environments that ``--environment`` names: one file each, found by its name.

A file defines one subclass of ``EnvironmentKind``. Validation imports every file, so a file imports slow libraries
inside the functions that use them.
"""

from miles.base.choices import Registry
from miles.tasks.environments.base import EnvironmentKind

ENVIRONMENTS = Registry(__name__, EnvironmentKind)  # type: ignore[type-abstract]
