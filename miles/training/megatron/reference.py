"""The reference model on Megatron under ``--ref-update-interval`` (training/scoring.py has the formula)."""

from __future__ import annotations

from pathlib import Path

import torch

import miles.training.megatron.checkpoint as checkpoint
from miles.training.checkpoint_io import StagedFiles
from miles.training.megatron.moe import expert_biases
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.training.scoring import check_can_follow, follow


class FollowingReference:
    """The weights of one rank's reference, which follow the policy. ``exact`` are in fp32 if they are mixed."""

    def __init__(self, stage: PolicyModel, ranks: Ranks, alpha: float) -> None:
        self._stage = stage
        self._ranks = ranks
        self._alpha = alpha
        self._own = named_weights(stage)
        self.exact = {name: w.detach() if alpha == 1 else w.detach().float() for name, w in self._own.items()}

    def check(self, policy: PolicyModel, path: str | None) -> None:
        """Raise ``ValueError`` if the reference at ``path`` has other weights than ``policy``."""
        of_policy = {
            name: w for name, w in named_weights(policy).items() if not name.startswith("mtp.")
        }  # it alone has heads
        check_can_follow(self._own, of_policy, path)

    def follow(self, policy: PolicyModel) -> None:
        """Copy the weights of ``policy``, or mix them in."""
        follow(self.exact, named_weights(policy), self._alpha)
        self._compute_with_exact()

    def save(self, folder: Path, staged: StagedFiles | None = None) -> None:
        """Write the weights into ``folder``, which is empty, or into ``staged``. Collective."""
        names = {id(weight): name for name, weight in self._own.items()}
        checkpoint.save_weights(folder, self._stage, self._ranks, lambda weight: self.exact[names[id(weight)]], staged)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote, under any layout. Collective."""
        names = {id(weight): name for name, weight in self._own.items()}
        for weight, whole in checkpoint.read_weights(folder, self._stage, self._ranks, "--load"):
            self.exact[names[id(weight)]].copy_(whole)
        self._compute_with_exact()

    @torch.no_grad()
    def _compute_with_exact(self) -> None:
        for name, weight in self._own.items():
            weight.copy_(self.exact[name])  # itself, unless weights are mixed


def named_weights(stage: PolicyModel) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors of a rank's chunks: parameters without the canary, and biases of experts."""
    found: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(stage.chunks, start=1):
        of_part = f" of part {number}" if len(stage.chunks) > 1 else ""
        named = dict(chunk.named_parameters()) | dict(expert_biases(chunk))
        found |= {name + of_part: weight for name, weight in named.items() if weight is not chunk.canary}
    return found
