"""Advantage estimators: ``--advantage-estimator``."""

from miles.objective.estimators.base import Estimator
from miles.objective.registry import Registry

ESTIMATORS = Registry(__name__, Estimator)  # type: ignore[type-abstract]
