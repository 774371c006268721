"""A Hugging Face causal language model as the trainer sees it: packed tokens in, log-probs and entropy out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from miles.loss.logprobs import chunked_log_probs
from miles.train_batch import MicroBatch
from miles.training.packed_attention import NAME, PackedLayout

# Settings by which a model changes its logits after the head; the head here is the plain product.
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Scores(NamedTuple):
    """What the loss reads of the model. A tuple, because FSDP looks for tensors in what a module returns."""

    log_probs: torch.Tensor  # fp32 [R]
    entropy: torch.Tensor | None  # fp32 [R]
    canary: torch.Tensor  # fp32 scalar, worth 0 (loss/canary.py)


class LossCanary(nn.Module):
    """The scalar whose gradient is the weight of all tokens; sharded and reduced like every parameter, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()

    def take_mass(self) -> torch.Tensor:
        """This rank's share of the reduced gradient, fp32 scalar; clears it."""
        gradient, self.weight.grad = self.weight.grad, None
        if gradient is None:
            return torch.zeros((), device=self.weight.device)
        return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).float().sum()


class Policy(nn.Module):
    """The model and its head. Only response positions reach the head, a chunk at a time (loss/logprobs.py)."""

    def __init__(self, language_model: PreTrainedModel, temperature: float, chunk_size: int) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.canary = LossCanary()

    def forward(self, micro: MicroBatch, with_entropy: bool) -> Scores:
        """Log-probs of ``micro.targets`` under softmax(logits / temperature), and the entropy if asked."""
        hidden = self.language_model.base_model(
            input_ids=micro.input_ids[None],
            position_ids=micro.position_ids[None],
            use_cache=False,
            packed=PackedLayout.of(micro.token_index, micro.total_lengths, micro.context),
        ).last_hidden_state[0]
        head = self.language_model.get_output_embeddings()
        log_probs, entropy = chunked_log_probs(
            hidden[micro.logit_index],
            head.weight,
            micro.targets,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            bias=head.bias,
            with_entropy=with_entropy,
        )
        return Scores(log_probs, entropy, self.canary())


def load_policy(path: str, temperature: float, chunk_size: int, dtype: torch.dtype) -> Policy:
    """The model at ``path`` in ``dtype``. Raises ``ValueError`` for a model whose logits are not the head's product."""
    config = AutoConfig.from_pretrained(path)
    for name in _LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"--hf-checkpoint {path}: its config sets {name}, which --train-backend fsdp does not compute; "
                "choose a model without it"
            )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=NAME)
    return Policy(model, temperature, chunk_size)


def shard_policy(policy: Policy, mesh: DeviceMesh, compute_dtype: torch.dtype, checkpointing: bool) -> None:
    """Shard every decoder layer and the rest over ``mesh``, in place; gradients are reduced in fp32, **as sums**.

    FSDP2 divides by the world size after reducing (``FSDPModule.set_gradient_divide_factor``); a factor of 1 cancels
    that. Gloo cannot reduce with a pre-multiplied factor, hence the forced sum. This is the one place of this backend
    that knows about averaging (docs/loss-aggregation.md, "gradients are sums").
    """
    if checkpointing:
        policy.language_model.gradient_checkpointing_enable({"use_reentrant": False})
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = mesh.size() > 1
    layers = policy.language_model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    fully_shard(policy.canary, mesh=mesh, mp_policy=exact, reshard_after_forward=False)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
