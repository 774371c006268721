"""The rewards that ``--rm-type`` names: one file each, found by its name.

A file defines one subclass of ``Reward``. Validation imports every file for its flags, so a file imports slow
libraries inside the functions that use them.
"""

from miles.base.choices import Registry
from miles.tasks.rewards.base import Reward

REWARDS = Registry(__name__, Reward)  # type: ignore[type-abstract]
