"""Policy losses: ``--policy-loss``."""

from miles.objective.policy_losses.base import PolicyLoss
from miles.objective.registry import Registry

POLICY_LOSSES = Registry(__name__, PolicyLoss)  # type: ignore[type-abstract]
