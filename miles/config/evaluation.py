"""Choose the held-out sets, and how they are sampled."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Optional

from miles.base.flags import Errors, flag
from miles.config.rollout import RolloutArguments, check_temperature, check_top_k
from miles.tasks.data.settings import DataArguments, check_pairs

_of_sets = partial(flag, needs="an evaluation set")


@dataclass(frozen=True)
class EvaluationArguments:
    """evaluation: sets, interval and their sampling parameters."""

    eval_prompt_data: Optional[tuple[str, ...]] = flag(
        None,
        "evaluation sets: NAME SOURCE pairs",
        needs="--eval-interval, no --debug-train-only, no --eval-config",
        nargs="+",
        type=str,
        metavar="NAME SOURCE",
    )
    eval_config: Optional[str] = flag(
        None,
        "YAML or JSON file of evaluation sets, each with its own sampling (instead of --eval-prompt-data)",
        needs="--eval-interval, no --debug-train-only",
        file="file",
    )
    eval_function_path: Optional[str] = flag(
        None,
        "your evaluation, in the place of the built-in one (docs/rollout.md), module:function",
        needs="--eval-interval, no --debug-train-only",
    )
    custom_eval_rollout_log_function_path: Optional[str] = flag(
        None,
        "your metrics of each evaluation (docs/rollout.md), module:function",
        needs="an evaluation set, no --eval-function-path",
    )
    eval_interval: Optional[int] = _of_sets(
        None, "iterations between evaluations; also before the first and after the last", at_least=1
    )
    skip_eval_before_train: bool = _of_sets(False, "do not evaluate before the first iteration")
    n_samples_per_eval_prompt: int = _of_sets(
        1, "responses per evaluation prompt; above 1, pass@k is logged too", at_least=1
    )
    eval_temperature: Optional[float] = _of_sets(
        None, "sampling temperature; default: --rollout-temperature", at_least=0
    )
    eval_top_p: Optional[float] = _of_sets(None, "top-p; default: --rollout-top-p", within="(0, 1]")
    eval_top_k: Optional[int] = _of_sets(None, "top-k; default: --rollout-top-k")
    eval_min_p: Optional[float] = _of_sets(None, "min-p; default: --rollout-min-p", within="[0, 1]")
    eval_max_response_len: Optional[int] = _of_sets(
        None, "maximum tokens of a response; default: --rollout-max-response-len", at_least=1
    )
    eval_input_key: Optional[str] = _of_sets(None, "prompt column; default: --input-key")
    eval_label_key: Optional[str] = _of_sets(None, "answer column; default: --label-key")

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
    """Check the NAME SOURCE pairs and the sampling."""
    if evaluation.eval_prompt_data is not None:
        check_pairs("eval_prompt_data", evaluation.eval_prompt_data, errors)
    check_temperature(evaluation, "eval_temperature", errors)
    check_top_k(evaluation, "eval_top_k", errors)
