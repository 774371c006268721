"""Choose the held-out sets, and how they are sampled."""

from dataclasses import dataclass, replace
from typing import Any, Optional

from miles.base.flags import Errors, flag
from miles.config.rollout import RolloutArguments, check_temperature, check_truncation
from miles.tasks.data.settings import DataArguments, check_pairs

OF_SETS = ("eval_prompt_data", "eval_config", "eval_function_path")  # any of them asks for an evaluation


@dataclass(frozen=True)
class EvaluationArguments:
    """evaluation: sets, interval and their sampling parameters."""

    eval_prompt_data: Optional[tuple[str, ...]] = flag(
        None, "evaluation sets: NAME SOURCE pairs", nargs="+", type=str, metavar="NAME SOURCE"
    )
    eval_config: Optional[str] = flag(
        None,
        "YAML or JSON file of evaluation sets, each with its own sampling (instead of --eval-prompt-data)",
        metavar="FILE",
    )
    eval_function_path: Optional[str] = flag(
        None, "your evaluation, in the place of the built-in one (docs/rollout.md), module:function"
    )
    custom_eval_rollout_log_function_path: Optional[str] = flag(
        None, "your metrics of each evaluation (docs/rollout.md), module:function"
    )
    eval_interval: Optional[int] = flag(
        None, "iterations between evaluations; also before the first and after the last"
    )
    skip_eval_before_train: bool = flag(False, "do not evaluate before the first iteration")
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt; above 1, pass@k is logged too")
    eval_temperature: Optional[float] = flag(None, "sampling temperature; default: --rollout-temperature")
    eval_top_p: Optional[float] = flag(None, "top-p; default: --rollout-top-p")
    eval_top_k: Optional[int] = flag(None, "top-k; default: --rollout-top-k")
    eval_min_p: Optional[float] = flag(None, "min-p; default: --rollout-min-p")
    eval_max_response_len: Optional[int] = flag(
        None, "maximum tokens of a response; default: --rollout-max-response-len"
    )
    eval_input_key: Optional[str] = flag(None, "prompt column; default: --input-key")
    eval_label_key: Optional[str] = flag(None, "answer column; default: --label-key")

    @property
    def has_sets(self) -> bool:
        """Whether anything is evaluated."""
        return any(name is not None for name in (self.eval_prompt_data, self.eval_config, self.eval_function_path))


def fill_evaluation(
    evaluation: EvaluationArguments, rollout: RolloutArguments, data: DataArguments
) -> EvaluationArguments:
    """Fill in what the flags of evaluation leave to those of training, in a run that evaluates."""
    if not evaluation.has_sets:
        return evaluation
    defaults: dict[str, Any] = {
        "eval_temperature": rollout.rollout_temperature,
        "eval_top_p": rollout.rollout_top_p,
        "eval_top_k": rollout.rollout_top_k,
        "eval_min_p": rollout.rollout_min_p,
        "eval_max_response_len": rollout.rollout_max_response_len,
        "eval_input_key": data.input_key,
        "eval_label_key": data.label_key,
    }
    return replace(evaluation, **{name: value for name, value in defaults.items() if getattr(evaluation, name) is None})


def check_evaluation(evaluation: EvaluationArguments, errors: Errors) -> None:
    """Check the NAME SOURCE pairs, the interval, and that no flag is given without a set."""
    if not evaluation.has_sets:
        unused = [name for name in vars(evaluation) if name not in OF_SETS]
        errors.refuse_ignored(evaluation, unused, "without an evaluation set", "add --eval-prompt-data NAME SOURCE")
        return
    if evaluation.eval_prompt_data is not None:
        check_pairs("eval_prompt_data", evaluation.eval_prompt_data, errors)
    if evaluation.eval_config is not None:
        errors.refuse_ignored(evaluation, ["eval_prompt_data"], "beside --eval-config", "list the set in that file")
        errors.existing_file("eval_config", evaluation.eval_config)
    if evaluation.eval_function_path is not None:
        why = "beside --eval-function-path, which returns its own metrics"
        errors.refuse_ignored(evaluation, ["custom_eval_rollout_log_function_path"], why, "return them there")
    errors.require("eval_interval", evaluation.eval_interval, "iterations between evaluations of the given sets")
    errors.at_least(evaluation, 1, "eval_interval", "n_samples_per_eval_prompt", "eval_max_response_len")
    check_temperature(evaluation, "eval_temperature", errors)
    check_truncation(evaluation, "eval_top_p", "eval_top_k", "eval_min_p", errors)
