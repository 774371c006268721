"""How the ranks of the Megatron backend are laid out."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


@dataclass(frozen=True)
class MegatronArguments:
    """megatron: layout of --train-backend megatron, which also takes fields of megatron-core's configuration."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each weight matrix")
    pipeline_model_parallel_size: int = flag(1, "ranks that each hold some of the layers")
    expert_model_parallel_size: int = flag(1, "ranks that each hold some of the experts")
    expert_tensor_parallel_size: Optional[int] = flag(
        None, "ranks that share each expert's matrices; default --tensor-model-parallel-size"
    )
    sequence_parallel: bool = flag(False, "share the norms' activations over the tensor-parallel ranks as well")
    use_distributed_optimizer: bool = flag(False, "share the optimizer's state over the data-parallel ranks")
    megatron_to_hf_mode: Literal["raw", "bridge"] = flag(
        "raw",
        "what moves weights between Megatron and Hugging Face: miles itself (raw), or Megatron-Bridge, where installed "
        "(bridge)",
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "where the experts' load is to be even: over each micro-batch (aux_loss), in each sample (seq_aux_loss), or "
        "nowhere (none)",
    )
    moe_aux_loss_coeff: float = flag(0.0, "weight of the routers' load-balancing loss")
    moe_z_loss_coeff: float = flag(0.0, "weight of the routers' z-loss, which keeps their logits small")
    mtp_num_layers: Optional[int] = flag(None, "heads that predict tokens further ahead; with --enable-mtp-training")
    enable_mtp_training: bool = flag(False, "train the heads of --mtp-num-layers, and the model through them")
    mtp_loss_scaling_factor: float = flag(0.2, "weight of the heads' mean loss")

    @property
    def mtp_heads(self) -> int:
        """Heads of multi-token prediction that are trained."""
        return self.mtp_num_layers or 0

    @property
    def has_router_loss(self) -> bool:
        """Whether the routers have a loss of their own."""
        return bool(self.moe_aux_loss_coeff or self.moe_z_loss_coeff)

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether every sample has a gradient, also one without an advantage."""
        return self.has_router_loss or self.mtp_heads > 0
