"""Policy losses: ``--policy-loss``."""

from miles.base.choices import Registry
from miles.objective.policy_losses.base import PolicyLoss

POLICY_LOSSES = Registry(__name__, PolicyLoss)  # type: ignore[type-abstract]
