"""The user's own evaluation, ``--eval-function-path``, or own metrics of the built-in one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any, Protocol

from miles.base.user_code.calls import user_code_in_thread
from miles.base.user_code.loading import load_function
from miles.config.flags_view import flags_view
from miles.config.settings import Settings
from miles.engine.base import Engine
from miles.engine.concurrency import gather_or_cancel
from miles.rollout.evaluate import EvalSet, evaluate
from miles.rollout.groups import GroupTools
from miles.rollout.metrics import with_own_metrics
from miles.tasks.rewards.base import RewardFunction
from miles.types.metrics import Metric
from miles.types.sample import SampleStatus

FLAG = "--eval-function-path"
LOG = "--custom-eval-rollout-log-function-path"


@dataclass(frozen=True)
class EvaluationTools:
    """What an evaluation function works with.

    Awaiting ``evaluate_sets()`` does what the run does without the function: it returns ``eval/…`` of every set, as
    numbers. The other attributes are for functions that generate or score by themselves.

    Attributes:
        version: Iterations that the engine's weights were trained on.
        eval_sets: The sets of ``--eval-prompt-data`` or ``--eval-config``; there may be none.
    """

    version: int
    eval_sets: Sequence[EvalSet]
    evaluate_sets: Callable[[], Awaitable[dict[str, float]]]
    engine: Engine
    tokenizer: Any
    reward_function: RewardFunction


class EvaluationFunction(Protocol):
    """Returns the metrics of an evaluation: finite numbers by name, logged as ``eval/<name>``."""

    async def __call__(self, args: SimpleNamespace, tools: EvaluationTools) -> Mapping[str, float]:
        """Return the metrics. ``args`` are the settings, by their flags' names."""
        ...


def load_evaluation_function(path: str) -> EvaluationFunction:
    """Return the function named by ``--eval-function-path``. Raises ``ValueError`` if it cannot be imported."""
    function: EvaluationFunction = load_function(path, FLAG)
    return function


def as_metrics(found: Any, path: str) -> dict[str, Metric]:
    """Return what the function has returned as metrics.

    Raises:
        ValueError: It is not a mapping of names to finite numbers.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{FLAG} {path}: returned {found!r:.80}; return numbers by name, such as {{'accuracy': 0.5}}")
    metrics = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{FLAG} {path}: the metric {name} is {value!r:.80}; return finite numbers")
        metrics[f"eval/{str(name).removeprefix('eval/')}"] = Metric(float(value), 1.0)
    return metrics


def own_evaluation(
    settings: Settings, eval_sets: list[EvalSet], tools: GroupTools
) -> Callable[[int], Awaitable[dict[str, Metric]]] | None:
    """Return a call of the function that a flag names: an evaluation, or metrics of one; None without such a flag.

    Raises:
        ValueError: The function cannot be imported.
    """
    path, seed = settings.evaluation.eval_function_path, settings.data.rollout_seed
    if path is None:
        return _logged_evaluation(settings, eval_sets, tools)
    function, args = load_evaluation_function(path), flags_view(settings)

    async def evaluate_sets() -> dict[str, float]:
        metrics, _ = await evaluate(eval_sets, tools, seed)
        return {name: metric.value for name, metric in metrics.items()}

    async def call(version: int) -> dict[str, Metric]:
        found = await function(
            args,
            EvaluationTools(version, eval_sets, evaluate_sets, tools.engine, tools.tokenizer, tools.reward_function),
        )
        return as_metrics(found, path)

    return call


def _logged_evaluation(
    settings: Settings, eval_sets: list[EvalSet], tools: GroupTools
) -> Callable[[int], Awaitable[dict[str, Metric]]] | None:
    """Return the built-in evaluation with the metrics of ``--custom-eval-rollout-log-function-path``."""
    path, seed = settings.evaluation.custom_eval_rollout_log_function_path, settings.data.rollout_seed
    if path is None:
        return None
    function, args = load_function(path, LOG), flags_view(settings)

    async def call(version: int) -> dict[str, Metric]:
        per_set = await gather_or_cancel(evaluate([eval_set], tools, seed) for eval_set in eval_sets)
        metrics = {name: metric for of_set, _ in per_set for name, metric in of_set.items()}
        data = {
            eval_set.name: {
                "rewards": [sample.reward for sample in samples],
                "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
                "samples": samples,
            }
            for eval_set, (_, samples) in zip(eval_sets, per_set, strict=True)
        }
        return await user_code_in_thread(
            with_own_metrics, metrics, lambda extra: function(version, args, data, extra), f"{LOG} {path}"
        )

    return call
