"""The losses that Megatron's layers add to the objective, for ``--explain`` and the reports (docs/parallelism.md)."""

from __future__ import annotations

from collections.abc import Iterator

from miles.base.flags import count
from miles.config.megatron.settings import MegatronArguments
from miles.objective.explain import AddedLoss

_ROUTER = "miles.training.megatron.moe.router"
_HEADS = "miles.training.megatron.model.mtp"
# By --moe-router-load-balancing-type, over what the load is balanced.
_BALANCED = {"aux_loss": "each micro-batch", "seq_aux_loss": "each sample"}


def added_losses(sizes: MegatronArguments) -> Iterator[AddedLoss]:
    """Yield the losses of routers and of heads for later tokens that have a weight."""
    group = _BALANCED.get(sizes.moe_router_load_balancing_type)
    if sizes.moe_aux_loss_coeff and group is not None:
        yield AddedLoss(
            sizes.moe_aux_loss_coeff,
            "aux_loss",
            f"Σ_layers Σ_w n_w/N E/(k n_w²) Σ_i c_wi P_wi, w = {group}, N = tokens of the step",
            _ROUTER,
            f"the routers' loss for a balanced load of the experts in {group}",
        )
    if sizes.moe_z_loss_coeff:
        yield AddedLoss(
            sizes.moe_z_loss_coeff,
            "z_loss",
            "Σ_layers 1/N Σ_t logsumexp(router logits)²",
            _ROUTER,
            "the routers' z-loss",
        )
    if sizes.mtp_heads:
        heads = count(sizes.mtp_heads, "head")
        yield AddedLoss(
            sizes.mtp_loss_scaling_factor,
            "mtp_loss",
            f"mean over {heads} k of 1/M_k Σ -log p(token k + 2 ahead), M_k = loss tokens that have it",
            _HEADS,
            f"the loss of {heads} that {'predicts' if sizes.mtp_heads == 1 else 'predict'} later tokens",
        )
