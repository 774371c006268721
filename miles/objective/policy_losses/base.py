"""Define a policy loss: from ratios and advantages to the loss of each token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from miles.base.choices import F
from miles.objective.registry import Needs, ObjectivePart, Term

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.types.train_batch import MicroBatch


@dataclass(frozen=True)
class PolicyTokens:
    """The response tokens of a micro-batch, as a policy loss reads them.

    Attributes:
        log_probs: Log-probs of the current policy, [R], with a graph; 0 without a graph for masked tokens.
        log_ratio: log current - log old, [R], with a graph, within +-80; 0 without a graph for masked tokens.
        advantages: [R]; masked tokens may hold anything.
        micro: The micro-batch, for what needs whole sequences (sequences.py).
    """

    log_probs: torch.Tensor
    log_ratio: torch.Tensor
    advantages: torch.Tensor
    micro: MicroBatch


@dataclass(frozen=True)
class StepTokens:
    """The loss tokens of a whole step, as a selection among them reads them: float64 [T], in the order of the step.

    Attributes:
        log_probs: Log-probs of the current policy.
        old_log_probs: Log-probs of the policy before the first step of the iteration.
        advantages: Their advantages.
        seed: For random choices. It depends on the trajectories of the step and its position in the iteration alone.
    """

    log_probs: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    seed: int


class TokenLosses(NamedTuple):
    """Losses [R], and whether each token was clipped (0/1, without a graph), [R], if it is known; both fp32."""

    losses: torch.Tensor
    clipped: torch.Tensor | None


class PolicyLoss(ObjectivePart[F]):
    """A policy loss.

    Attributes:
        sees_whole_samples: Whether it must be given whole responses also where context parallelism has cut them. Then
            every rank of the context group evaluates all of them.
        reads_ratio: Whether it reads the ratio to the old policy.
        selects_tokens: Whether it chooses tokens from the whole step before the step: ``select_tokens``. Its losses
            read the choice as ``MicroBatch.selected``, which is None if the policy was not scored for it.
    """

    flag: ClassVar[str] = "policy_loss"
    sees_whole_samples: ClassVar[bool] = False
    reads_ratio: ClassVar[bool] = True
    selects_tokens: ClassVar[bool] = False

    @abstractmethod
    def formula(self, flags: F) -> list[Term]:
        """Return the lines of the formula that it computes, with the run's numbers."""

    def needs(self, flags: F) -> Needs:
        """Ask for the entropy, which is reported even if its coefficient is 0."""
        return Needs(entropy=True)

    def idle_on_policy(self, flags: F) -> list[str]:
        """Say which of its flags have no effect if an iteration has one step, so that every ratio is 1."""
        return []

    def select_tokens(self, flags: F, tokens: StepTokens) -> np.ndarray:
        """Choose tokens of a step, bool [T], the same on every rank. Only called if it ``selects_tokens``."""
        raise NotImplementedError

    @abstractmethod
    def token_losses(self, flags: F, tokens: PolicyTokens) -> TokenLosses:
        """Compute the loss of every token, to be minimized."""
