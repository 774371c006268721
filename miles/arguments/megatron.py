"""How the ranks of the Megatron backend are laid out."""

from dataclasses import dataclass
from typing import Optional

from miles.arguments.flag import flag


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

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense weights."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_ranks_a_matrix(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size
