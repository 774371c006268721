"""Megatron's AdamW, with the schedule and the safeguards that both backends share."""

from __future__ import annotations

import math
from typing import Any

import megatron.core.optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

from miles.arguments.optimizer import OptimizerArguments
from miles.metrics import Metric
from miles.training.learning_rate import learning_rate

# Megatron takes Adam from Transformer Engine or Apex where they are installed. Theirs keep the number of steps in
# another place, and need a GPU: every run has torch's, whose state checkpoints are made of (optimizer_state.py).
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True


class MegatronOptimizer:
    """fp32 AdamW over the model's gradient buffers. Weight decay applies to matrices only, not to norms and biases."""

    def __init__(
        self,
        model: DistributedDataParallel,
        config: OptimizerConfig,
        settings: OptimizerArguments,
        total_steps: int,
        rate_flag: str = "--lr",
    ) -> None:
        # The overrides exempt norms and biases from weight decay; Megatron's scheduler, which would apply them, is not
        # used: the schedule is one for both backends.
        overrides = get_standard_config_overrides(config)
        self.adam = get_megatron_optimizer(config, [model], overrides, use_gloo_process_groups=False)
        for group in self.adam.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            group["fused"] = True  # torch's AdamW takes the loop over tensors unless it is told
        self.settings = settings
        self.total_steps = total_steps
        self.steps_done = 0
        self.rate_flag = rate_flag
        self._model = model

    def step(self) -> dict[str, Metric]:
        """Clip, update and clear. Raises ``FloatingPointError``, weights untouched, if a gradient is not finite."""
        self.adam.prepare_grads()
        norm = float(self.adam.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.steps_done} is {norm}; the weights were left as they were. "
                f"Lower {self.rate_flag} or set --clip-grad, and resume from the last checkpoint with --load"
            )
        rate = learning_rate(self.steps_done, self.settings, self.total_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        updated, _norm, _zeros = self.adam.step()
        assert updated, "only a loss scaler, which fp16 has, refuses an update"
        self._clear()
        self.steps_done += 1
        return {"grad_norm": Metric(norm), "lr": Metric(rate)}

    def skip(self) -> dict[str, Metric]:
        """Leave weights and schedule as they are (a step without a single loss token)."""
        self._clear()
        return {"skipped_steps": Metric(1.0)}

    def state(self) -> dict[str, Any]:
        """What the schedule needs to go on."""
        return {"steps_done": self.steps_done}

    def _clear(self) -> None:
        self._model.zero_grad_buffer()
        self.adam.zero_grad()
