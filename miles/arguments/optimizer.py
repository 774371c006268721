"""The optimizer and its schedule."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


@dataclass(frozen=True)
class OptimizerArguments:
    """optimizer: AdamW, learning-rate schedule and clipping."""

    optimizer: Literal["adam"] = flag("adam", "optimizer family: adam is AdamW with decoupled weight decay")
    lr: float = flag(1e-6, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate that the decay ends at")
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag("linear", "shape of the decay after the warm-up")
    lr_decay_iters: Optional[int] = flag(None, "optimizer steps until --min-lr; default all steps of the run")
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up")
    lr_warmup_fraction: Optional[float] = flag(
        None, "warm-up as a share of --lr-decay-iters, instead of --lr-warmup-iters"
    )
    adam_beta1: float = flag(0.9, "decay of Adam's first moment")
    adam_beta2: float = flag(0.999, "decay of Adam's second moment")
    adam_eps: float = flag(1e-8, "Adam's epsilon")
    weight_decay: float = flag(0.01, "decoupled weight decay, of matrices only")
    clip_grad: float = flag(1.0, "global gradient norm above which gradients are scaled down; 0 is off")
