"""Loss types: ``--loss-type``."""

from miles.base.choices import Registry
from miles.objective.loss_types.base import LossType

LOSS_TYPES = Registry(__name__, LossType)  # type: ignore[type-abstract]
