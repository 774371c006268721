"""Configure the Megatron backend: how ranks share the model, and the losses inside the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional

from miles.base.flags import count, flag
from miles.objective.chosen import AddedLoss

_of_megatron = partial(flag, needs="Megatron")


@dataclass(frozen=True)
class MegatronArguments:
    """megatron: layout of --train-backend megatron, which also accepts fields of megatron-core's configuration."""

    tensor_model_parallel_size: int = _of_megatron(1, "ranks that share each weight matrix")
    pipeline_model_parallel_size: int = _of_megatron(1, "pipeline stages: ranks that each hold some of the layers")
    decoder_first_pipeline_num_layers: Optional[int] = flag(
        None,
        "layers of the first pipeline stage; the stages without a number share the rest equally",
        needs="Megatron, --pipeline-model-parallel-size",
        at_least=1,
    )
    decoder_last_pipeline_num_layers: Optional[int] = flag(
        None, "layers of the last pipeline stage", needs="Megatron, --pipeline-model-parallel-size", at_least=1
    )
    num_layers_per_virtual_pipeline_stage: Optional[int] = flag(
        None,
        "interleave the pipeline: every rank holds several parts of so many layers, and waits less for the others",
        needs="Megatron, --pipeline-model-parallel-size",
        at_least=1,
    )
    expert_model_parallel_size: int = flag(1, "ranks that each hold some of the experts", needs="Megatron, experts")
    expert_tensor_parallel_size: Optional[int] = flag(
        None,
        "ranks that share the matrices of each expert; default: --tensor-model-parallel-size",
        needs="Megatron, experts or --expert-tensor-parallel-size 1",
    )
    sequence_parallel: bool = flag(
        False,
        "divide the activations of the norms over the tensor-parallel ranks as well",
        needs="Megatron, --tensor-model-parallel-size",
    )
    use_distributed_optimizer: bool = _of_megatron(False, "divide the optimizer's state over the data-parallel ranks")
    optimizer_cpu_offload: bool = flag(
        False,
        "on a GPU, keep the optimizer's state in host memory and update there; implies --use-distributed-optimizer",
        needs="Megatron, no --device cpu",
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        "part of the state that --optimizer-cpu-offload keeps in host memory",
        needs="Megatron, no --device cpu, --optimizer-cpu-offload",
        within="(0, 1]",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        "copy gradients and weights while other weights are updated",
        needs="Megatron, no --device cpu, --optimizer-cpu-offload",
    )
    megatron_to_hf_mode: Literal["raw", "bridge"] = _of_megatron(
        "raw",
        "what converts weights between Megatron and Hugging Face: miles (raw), or Megatron-Bridge, if it is installed "
        "(bridge)",
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "balance the load of the experts over each micro-batch (aux_loss), in each sample (seq_aux_loss), or not at "
        "all (none)",
        needs="Megatron, --moe-aux-loss-coeff",
    )
    moe_aux_loss_coeff: float = flag(0.0, "weight of the routers' load-balancing loss", at_least=0)
    moe_z_loss_coeff: float = flag(0.0, "weight of the routers' z-loss, which keeps their logits small", at_least=0)
    mtp_num_layers: Optional[int] = flag(
        None,
        "heads that predict later tokens (multi-token prediction)",
        needs="Megatron, --enable-mtp-training",
        at_least=1,
    )
    enable_mtp_training: bool = flag(False, "train the heads of --mtp-num-layers, and the model through their loss")
    mtp_loss_scaling_factor: float = flag(
        0.2, "weight of the mean loss of the heads", needs="Megatron, --enable-mtp-training", at_least=0
    )

    def chunks(self, layers: int) -> int:
        """Return the parts that every rank has of a model of ``layers``, which the sizes divide: 1 without a flag."""
        each = self.num_layers_per_virtual_pipeline_stage
        return 1 if each is None else layers // (self.pipeline_model_parallel_size * each)

    @property
    def divides_optimizer(self) -> bool:
        """Whether the optimizer's state is divided over the data-parallel ranks, as an offloaded one is too."""
        return self.use_distributed_optimizer or self.optimizer_cpu_offload

    @property
    def uses_bridge(self) -> bool:
        """Whether Megatron-Bridge builds the model and converts its weights."""
        return self.megatron_to_hf_mode == "bridge"

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
        """Whether every sample has a gradient, even if its advantage is 0."""
        return self.has_router_loss or self.mtp_heads > 0


# The losses that Megatron's layers add to the objective, for ``--explain`` and the reports (docs/parallelism.md).


_ROUTER = "miles.training.megatron.moe"
_HEADS = "miles.training.megatron.model.packed_tokens"
# By --moe-router-load-balancing-type, the unit that the load is balanced over.
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
