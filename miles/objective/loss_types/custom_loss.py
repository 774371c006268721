"""A loss that the user's function computes whole: ``--custom-loss-function-path``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from miles.base.user_code import import_function
from miles.objective.adaptive import adaptive_kl_formula
from miles.objective.aggregation import aggregation_formula, get_pg_loss_reducer, get_sum_of_sample_mean, is_per_token
from miles.objective.hooks import FOUR_ARGUMENTS, WHOLE_LOSS, LossInputs, token_columns
from miles.objective.loss_types.base import LossType, Objective, advantage_terms
from miles.objective.output import LossOutput, PolicyScores
from miles.objective.registry import Needs, Term
from miles.objective.sequences import count_once, gather_whole, whole_responses
from miles.objective.token_weights import SWITCHES

if TYPE_CHECKING:
    import torch

    from miles.base.flags import Errors
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


class CustomLoss(LossType):
    """Train the policy on a loss of the user's own."""

    name = "custom_loss"
    summary = "your own"
    reads = ("custom_loss_function_path",)
    reads_any = True
    lacks = ("policy_loss", "custom_policy_loss_function_path", "entropy_target", *SWITCHES)
    instead_of_lacking = "compute it in your function"

    def needs_of(self, objective: Objective) -> Needs:
        """Add the entropy, which the function is given."""
        return super().needs_of(objective) | Needs(entropy=True)

    def check(self, flags: LossArguments, shape: StepShape, errors: Errors) -> None:
        """Require the function, and a KL in the reward for a weight of it that adapts."""
        if flags.kl_target is not None and not flags.kl_coef:
            rule = f"adapts --kl-loss-coef, which --loss-type {self.name} leaves to your function"
            errors.refuse("kl_target", flags.kl_target, rule, "add --kl-coef 0.001, or drop it")
        if flags.custom_loss_function_path is None:
            rule = "needs the function to compute"
            errors.refuse("loss_type", self.name, rule, "add --custom-loss-function-path module:function")

    def zero_advantage_has_gradient(self, flags: LossArguments) -> bool:
        """Return the function's attribute of this name; true if it has none."""
        return WHOLE_LOSS.zero_advantage_has_gradient(_path(flags))

    def terms(self, objective: Objective, shape: StepShape) -> list[Term]:
        """Return the call of the function, and its inputs."""
        flags = objective.flags
        whole = Term(f"loss = {_path(flags)}(log p, log p_old, A, ...)", __name__, flags.custom_loss_function_path)
        mean = aggregation_formula("reduce(l)", flags, shape)
        return [whole, *mean, *adaptive_kl_formula(flags), *advantage_terms(objective, shape)]

    def words(self, objective: Objective) -> str:
        """Name the function."""
        return f"your loss {_path(objective.flags)}"

    def language_model_loss(self, objective: Objective, micro: MicroBatch, scores: PolicyScores) -> LossOutput:
        """Call the function on the whole samples of one micro-batch; count the loss once in each context group.

        Some backends need the canary in the graph; its gradient is 0 here.
        """
        assert scores.entropy is not None, "a custom loss is given the entropy"
        path = _path(objective.flags)
        whole = gather_whole(micro)
        masked = micro.loss_mask == 0
        log_probs = whole_responses(scores.log_probs.float().masked_fill(masked, 0.0), micro)
        entropy = whole_responses(scores.entropy.float().masked_fill(masked, 0.0), micro)
        takes_four = WHOLE_LOSS.num_arguments(WHOLE_LOSS.load(path), path) == 4
        share = import_function(FOUR_ARGUMENTS, WHOLE_LOSS.flag) if takes_four else _of_one
        total, metrics = share(objective, micro, whole, log_probs, entropy)
        if scores.canary is not None:
            total = total + 0.0 * scores.canary
        counted = {name: count_once(value.detach(), micro) for name, value in {**metrics, "loss": total}.items()}
        return LossOutput(count_once(total, micro), counted)


def _path(flags: LossArguments) -> str:
    assert flags.custom_loss_function_path is not None, "validate() demands --custom-loss-function-path"
    return flags.custom_loss_function_path


def _of_one(
    objective: Objective, micro: MicroBatch, whole: MicroBatch, log_probs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the share of the loss, and of the metrics, by a function of one ``LossInputs``."""
    loss = objective.flags
    path = _path(loss)
    function = WHOLE_LOSS.load(path)
    names = tuple(getattr(function, "metrics", ()))
    if not micro.response_lengths:
        return log_probs.sum() + entropy.sum(), dict.fromkeys(names, log_probs.new_zeros(()))
    inputs = LossInputs(
        **token_columns(whole, log_probs),
        settings=loss,
        entropy=entropy,
        reduce=get_pg_loss_reducer(loss, whole),
        mean=get_sum_of_sample_mean(whole, is_per_token(loss)),
    )
    result = function(inputs)
    total, metrics = result if isinstance(result, tuple) else (result, {})
    WHOLE_LOSS.check_tensor(path, total, ())
    if set(metrics) != set(names):
        raise ValueError(
            f"{WHOLE_LOSS.flag} {path}: returned the metrics {sorted(metrics)}, and its attribute metrics declares "
            f"{sorted(names)}; declare those that it returns"
        )
    for name, value in metrics.items():
        WHOLE_LOSS.check_tensor(path, value, (), f", metric {name}")
    return total, metrics
