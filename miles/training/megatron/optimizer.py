"""Megatron's AdamW under the schedule of training/optimizer.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

from miles.config.optimizer import OptimizerArguments
from miles.training.optimizer import ScheduledOptimizer

# Megatron takes Adam from Transformer Engine or Apex if they are installed. Theirs keep the number of steps in
# another place, and need a GPU: every run has torch's, whose state checkpoints are made of (optimizer_state.py).
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
megatron.core.optimizer.Adam = torch.optim.AdamW  # of what --optimizer-cpu-offload leaves on the GPU


class MegatronOptimizer(ScheduledOptimizer):
    """fp32 AdamW over the gradient buffers of the model's chunks. Weight decay applies to matrices only.

    With ``config.optimizer_cpu_offload`` its state, and the fp32 weights, are in host memory and are updated there
    (Megatron's ``HybridDeviceOptimizer``).
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        settings: OptimizerArguments,
        total_steps: int,
        rate_flag: str = "--lr",
    ) -> None:
        super().__init__(settings, total_steps, rate_flag)
        # The overrides exempt norms and biases from weight decay; Megatron's scheduler, which would apply them, is not
        # used: the schedule is one for both backends.
        overrides = get_standard_config_overrides(config)
        # Of fp32 weights (of the canary, and of adapters) the distributed optimizer takes views, which torch's Adam in
        # host memory accepts only without a graph.
        with torch.no_grad() if config.optimizer_cpu_offload else nullcontext():
            self.adam = get_megatron_optimizer(config, [*models], overrides, use_gloo_process_groups=False)
        for group in self.adam.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            group["fused"] = True  # torch's AdamW loops over tensors by default
        self._models = models

    def _gradient_norm(self) -> float:
        self.adam.prepare_grads()
        return float(self.adam.get_grad_norm())

    def _clip_and_update(self, norm: float) -> None:
        updated, _norm, _zeros = self.adam.step()  # clips by itself
        assert updated, "only a loss scaler, which fp16 has, refuses an update"

    def _clear(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self.adam.zero_grad()
