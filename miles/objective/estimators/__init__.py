"""Advantage estimators: ``--advantage-estimator``."""

from miles.base.choices import Registry
from miles.objective.estimators.base import Estimator

ESTIMATORS = Registry(__name__, Estimator)  # type: ignore[type-abstract]
