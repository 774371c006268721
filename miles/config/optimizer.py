"""Configure the optimizer and its learning-rate schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Optional

from miles.base.flags import Errors, count, flag, flag_name


@dataclass(frozen=True)
class OptimizerArguments:
    """optimizer: AdamW, learning-rate schedule and clipping."""

    optimizer: Literal["adam"] = flag("adam", "optimizer: adam is AdamW, with decoupled weight decay")
    lr: float = flag(1e-6, "peak learning rate", within="(0, 1]", needs="a policy that learns or no --critic-lr")
    min_lr: float = flag(0.0, "learning rate at the end of the decay", at_least=0, needs="no --lr-decay-style constant")
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag("linear", "shape of the decay after the warm-up")
    lr_decay_iters: Optional[int] = flag(
        None,
        "optimizer steps until --min-lr; default: all steps of the run",
        at_least=1,
        needs="no --lr-decay-style constant or --lr-warmup-fraction",
    )
    lr_warmup_iters: int = flag(
        0, "optimizer steps of linear warm-up", at_least=0, needs="a policy that learns, no --lr-warmup-fraction"
    )
    lr_warmup_fraction: Optional[float] = flag(
        None,
        "warm-up as a share of --lr-decay-iters, instead of --lr-warmup-iters",
        within="[0, 1]",
        needs="a policy that learns",
    )
    adam_beta1: float = flag(0.9, "decay rate of Adam's first moment", within="[0, 1)")
    adam_beta2: float = flag(0.999, "decay rate of Adam's second moment", within="[0, 1)")
    adam_eps: float = flag(1e-8, "Adam's epsilon", above=0)
    weight_decay: float = flag(0.01, "decoupled weight decay, of matrices only", at_least=0)
    clip_grad: float = flag(1.0, "global gradient norm above which gradients are scaled down; 0 is off", at_least=0)

    @property
    def warmup_field(self) -> str:
        """The field that states how long the warm-up is."""
        return "lr_warmup_iters" if self.lr_warmup_fraction is None else "lr_warmup_fraction"

    @property
    def warmup_value(self) -> float:
        """The value of that field: steps, or a share of the decay."""
        return self.lr_warmup_iters if self.lr_warmup_fraction is None else self.lr_warmup_fraction

    def decay_steps(self, total_steps: int) -> int:
        """Return the optimizer steps until ``min_lr`` in a run of ``total_steps``."""
        return total_steps if self.lr_decay_iters is None else self.lr_decay_iters

    def warmup_steps(self, total_steps: int) -> int:
        """Return the optimizer steps of the linear warm-up in a run of ``total_steps``."""
        if self.lr_warmup_fraction is None:
            return self.lr_warmup_iters
        return round(self.lr_warmup_fraction * self.decay_steps(total_steps))


def check_optimizer(optimizer: OptimizerArguments, errors: Errors) -> None:
    """Check that the decay ends below its start, and that the warm-up is shorter."""
    if errors.none_about("lr", "min_lr") and optimizer.min_lr > optimizer.lr:
        rule = f"the decay would end above --lr {optimizer.lr:g}"
        errors.refuse("min_lr", f"{optimizer.min_lr:g}", rule, "give at most --lr")
    check_warmup(optimizer.warmup_field, optimizer, errors)


def check_warmup(field: str, optimizer: OptimizerArguments, errors: Errors) -> None:
    """Refuse a warm-up that is not shorter than ``--lr-decay-iters``, which includes it, as Megatron does.

    Args:
        field: The flag of the warm-up: the critic has its own.
        optimizer: The settings, with this warm-up as ``lr_warmup_iters`` or ``lr_warmup_fraction``.
        errors: Collects the errors.
    """
    decay, fraction = optimizer.lr_decay_iters, optimizer.lr_warmup_fraction
    if optimizer.lr_decay_style == "constant" or not errors.none_about(field, "lr_decay_iters"):
        return
    if fraction == 1:
        errors.refuse(field, 1, "leaves no step to the decay", "give less than 1")
    elif decay is not None and optimizer.warmup_steps(decay) >= decay:
        rule = f"must be less than --lr-decay-iters {decay}, which includes the warm-up"
        if fraction is not None:
            rule = f"is {count(decay, 'step')}, and {rule}"
        errors.refuse(field, optimizer.warmup_value, rule, "give a shorter warm-up or a longer decay")


def notes_on_warmup(field: str, optimizer: OptimizerArguments, steps: int) -> Iterator[str]:
    """Yield a note if the warm-up of ``optimizer`` takes all ``steps`` of a run, as in a short trial.

    ``field`` is the flag that states how long it is.
    """
    if optimizer.warmup_steps(steps) >= steps:
        all_of_run = f"all of the run ({count(steps, 'optimizer step')})"
        yield f"{flag_name(field)} {optimizer.warmup_value}: {all_of_run} is warm-up"
