"""The user's functions on groups, iterations and evaluations: a flag names the path of each.

The first chooses among finished groups that wait for an iteration: ``--buffer-filter-path``.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeAlias

from miles.base.user_code import load_function, user_code_in_thread
from miles.config.functions import flags_view
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.engine.base import Engine
from miles.rollout.collect import GroupCollector, ScoredGroups
from miles.rollout.evaluate import EvalSet, evaluate
from miles.rollout.groups import GroupTools, ProducedGroup
from miles.rollout.metrics import rollout_metrics, with_own_metrics
from miles.tasks.data.stream import TrainingStream
from miles.tasks.rewards.base import RewardFunction
from miles.tasks.rewards.settings import RewardArguments
from miles.types.metrics import Metric
from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus

_BUFFER = "--buffer-filter-path"
MOST_DROPPED = 1000  # groups in a row, without one that is picked: the function keeps nothing


class Picked(NamedTuple):
    """The groups that waited: picked ones, ones that wait further, and dropped ones."""

    picked: list[PromptGroup]
    waiting: list[PromptGroup]
    dropped: list[PromptGroup]


class BufferFilter:
    """Calls ``def pick(args, rollout_id, buffer, num_samples) -> list[list[Sample]]``, as related launchers do.

    ``buffer`` has the samples of each finished group, by ``group_index``. The function returns up to ``num_samples`` of
    its entries, which the iteration trains on. Groups that it takes out of ``buffer`` without returning them are
    dropped; the others wait.
    """

    def __init__(self, path: str, args: Any) -> None:
        """Import the function. ``args`` are all flags by their names.

        Raises:
            ValueError: The path cannot be imported.
        """
        self._path = path
        self._args = args
        self._function: Callable[..., Any] = load_function(path, _BUFFER)
        self._dropped_in_a_row = 0

    def pick(self, iteration: int, groups: Sequence[PromptGroup], wanted: int) -> Picked:
        """Return which of ``groups`` are picked, wait and are dropped, each in the order of ``groups``.

        Raises:
            ValueError: The function returned something else than entries of the buffer, or too many, or it has picked
                nothing of ``MOST_DROPPED`` groups.
        """
        group_of = {id(group.samples): group for group in groups}
        buffer = [group.samples for group in groups]
        answer = self._function(self._args, iteration, buffer, wanted)
        at = f"{_BUFFER} {self._path}: iteration {iteration}"
        ids = [id(samples) for samples in answer] if isinstance(answer, list) else None
        if ids is None or len({*ids} & group_of.keys()) != len(ids):
            raise ValueError(f"{at}: returned {answer!r:.80}; return a list of entries of buffer, each once")
        if len(ids) > wanted:
            raise ValueError(f"{at}: returned {len(ids)} groups; return at most num_samples, {wanted}")
        waiting = {id(samples) for samples in buffer} - {*ids}
        if not waiting <= group_of.keys():
            raise ValueError(f"{at}: put other groups into buffer; take groups out of it, or leave them there")
        result = Picked(
            [group for group in groups if id(group.samples) in ids],
            [group for group in groups if id(group.samples) in waiting],
            [group for group in groups if id(group.samples) not in waiting and id(group.samples) not in ids],
        )
        self._dropped_in_a_row = 0 if result.picked else self._dropped_in_a_row + len(result.dropped)
        if self._dropped_in_a_row >= MOST_DROPPED:
            raise ValueError(
                f"{at}: it has dropped {self._dropped_in_a_row} groups in a row and picked none; return some of them, "
                "or leave them in buffer"
            )
        return result

    def stuck(self, iteration: int, waiting: int, missing: int) -> ValueError:
        """Return the error of a run that may generate no further group, and has picked too few."""
        rule = f"iteration {iteration} misses {missing} groups, and {waiting} wait and are not picked"
        return ValueError(
            f"{_BUFFER} {self._path}: {rule}, and no more may be generated while they wait; pick more, take those out "
            "of buffer that are never picked, or raise --over-sampling-batch-size (with --fully-async: --async-steps)"
        )


# Build the training data with the user's function: ``--custom-convert-samples-to-train-data-path``.


CONVERT = "--custom-convert-samples-to-train-data-path"
REQUIRED = ("tokens", "response_lengths", "rewards")
OPTIONAL = ("loss_masks", "rollout_log_probs", "sample_indices")
NOT_READ = ("raw_reward", "truncated", "round_number", "metadata")  # values that other launchers log, or pass on


def converted_groups(returned: Any, groups: Sequence[PromptGroup], path: str) -> list[PromptGroup]:
    """Return the groups with the rows of ``returned`` as their samples.

    Args:
        returned: The columns that the function has returned, with one entry per row. ``tokens`` are the tokens of
            prompt and response, ``rewards`` the advantages, ``loss_masks`` and ``rollout_log_probs`` have one entry per
            response token; without them, a row has the values of the sample whose tokens it repeats. ``sample_indices``
            name the trajectory of each row, as ``sample.index`` does; without them there is a row for each sample, in
            order.
        groups: The groups that the function was given.
        path: The function, for messages.

    Raises:
        ValueError: A column is missing, unknown, or of another length, or a row is malformed.
    """
    samples = [sample for group in groups for sample in group.samples]
    columns = _columns(returned, path)
    rows = len(columns["tokens"])
    owners = _owners(columns, samples, rows, path)
    by_group: dict[int, list[Sample]] = {group.group_index: [] for group in groups}
    for row, owner in enumerate(owners):
        by_group[owner.group_index].append(_sample(columns, row, owner, path))
    converted = []
    for group in groups:
        rows_of_group = by_group[group.group_index]
        missing = len({s.trajectory_id for s in group.samples} - {s.trajectory_id for s in rows_of_group})
        dropped = group.dropped_trajectories + missing
        converted.append(
            replace(group, samples=rows_of_group, dropped_trajectories=dropped, unconverted_trajectories=missing)
        )
    return converted


def _columns(returned: Any, path: str) -> Mapping[str, Sequence[Any]]:
    if not isinstance(returned, Mapping):
        raise ValueError(
            f"{CONVERT} {path}: returned {returned!r:.80}; return columns by name: {', '.join(REQUIRED)}, …"
        )
    missing = [name for name in REQUIRED if name not in returned]
    unknown = [str(name) for name in returned if name not in (*REQUIRED, *OPTIONAL, *NOT_READ)]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is not read here"
        raise ValueError(f"{CONVERT} {path}: its result {what}; the columns are {', '.join((*REQUIRED, *OPTIONAL))}")
    lengths = {name: len(returned[name]) for name in (*REQUIRED, *OPTIONAL) if returned.get(name) is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{CONVERT} {path}: its columns have the lengths {lengths}; return one entry per row in each")
    return returned


def _owners(columns: Mapping[str, Sequence[Any]], samples: Sequence[Sample], rows: int, path: str) -> list[Sample]:
    """Return the sample that each row repeats, or else the first of the trajectory that it belongs to."""
    indices = columns.get("sample_indices")
    if indices is None:
        if rows != len(samples):
            raise ValueError(
                f"{CONVERT} {path}: returned {rows} rows for {len(samples)} samples; name the trajectory of each row "
                "in sample_indices"
            )
        return list(samples)
    by_trajectory: dict[Any, list[Sample]] = {}
    for sample in samples:
        by_trajectory.setdefault(sample.trajectory_id, []).append(sample)
    owners = []
    for row, index in enumerate(indices):
        if index not in by_trajectory:
            raise ValueError(f"{CONVERT} {path}: sample_indices has {index!r:.80}, which is the index of no sample")
        of_trajectory = by_trajectory[index]
        tokens = list(columns["tokens"][row])
        length = int(columns["response_lengths"][row])
        repeated = (s for s in of_trajectory if s.response_length == length and s.tokens == tokens)
        owners.append(next(repeated, of_trajectory[0]))
    return owners


def _sample(columns: Mapping[str, Sequence[Any]], row: int, owner: Sample, path: str) -> Sample:
    tokens = [int(token) for token in columns["tokens"][row]]
    length = int(columns["response_lengths"][row])
    if not 0 < length < len(tokens):
        raise ValueError(
            f"{CONVERT} {path}: row {row} has {len(tokens)} tokens and a response of {length}; give both a prompt and "
            "a response"
        )
    advantage = float(columns["rewards"][row])
    if not math.isfinite(advantage):
        raise ValueError(f"{CONVERT} {path}: row {row} has the advantage {advantage}; return finite numbers")
    prompt = tuple(tokens[:-length])
    response = tokens[-length:]
    masks = columns.get("loss_masks")
    log_probs = columns.get("rollout_log_probs")
    is_unchanged = response == owner.response_ids and prompt == owner.prompt.token_ids
    missing = [name for name in ("loss_masks", "rollout_log_probs") if columns.get(name) is None]
    if missing and not is_unchanged:
        raise ValueError(
            f"{CONVERT} {path}: row {row} has other tokens than the samples of trajectory {owner.index}; give its "
            f"{' and '.join(missing)}"
        )
    sample = Sample(
        owner.prompt if prompt == owner.prompt.token_ids else Prompt(owner.prompt.text, prompt, owner.label),
        owner.group_index,
        owner.trajectory_id,
        response_ids=response,
        response=owner.response,
        loss_mask=list(owner.loss_mask) if masks is None else [int(mask) for mask in masks[row]],
        rollout_log_probs=list(owner.rollout_log_probs) if log_probs is None else [float(p) for p in log_probs[row]],
        status=owner.status,
        reward=owner.reward,
        reward_parts=owner.reward_parts,
        weight_versions=list(owner.weight_versions) if is_unchanged else [],
        support=owner.support if is_unchanged else None,
        experts=owner.experts if is_unchanged else None,
        remove_sample=owner.remove_sample,
        advantage=advantage,
    )
    try:
        sample.check()
    except ValueError as error:
        raise ValueError(f"{CONVERT} {path}: row {row}: {error}") from None
    return sample


# Call the user's functions on the scored groups of an iteration, before these are converted for the trainer.
#
# In this order: samples that are not trained on are marked, all samples are shown, metrics are logged, and samples are
# replaced by the samples to train on. Each function is given ``args``, the settings by their flags' names
# (``miles/config/functions.py``), and samples in groups.


FILTER = "--rollout-sample-filter-path"
PROCESS = "--rollout-all-samples-process-path"
LOG = "--custom-rollout-log-function-path"


class IterationHooks:
    """The functions that a run calls on each iteration; none of them by default.

    Attributes:
        is_idle: Whether there is nothing to do.
    """

    def __init__(self, settings: Settings, source: Any = None) -> None:
        """Import the functions. ``source`` is the source of prompts, which one of them is given.

        Raises:
            ValueError: A path cannot be imported.
        """
        rollout = settings.rollout
        self._args: SimpleNamespace = flags_view(settings)
        self._source = source
        self._drops_zero_rewards = rollout.filter_zero_reward_samples
        self._drops_truncated = rollout.mask_truncated_completions
        self._filter_path = rollout.rollout_sample_filter_path
        self._filter = _load(self._filter_path, FILTER)
        self._process = _load(rollout.rollout_all_samples_process_path, PROCESS)
        self._log_path = rollout.custom_rollout_log_function_path
        self._log = _load(self._log_path, LOG)
        self._convert_path = rollout.custom_convert_samples_to_train_data_path
        self._convert = _load(self._convert_path, CONVERT)
        self._removes_samples = self._filter is not None or self._drops_zero_rewards or self._drops_truncated
        self.is_idle = not (self._removes_samples or self._process or self._log or self._convert)

    def apply(self, iteration: int, scored: ScoredGroups, seconds: float) -> ScoredGroups:
        """Return the iteration as the functions leave it.

        Args:
            iteration: The iteration, counted from 0.
            scored: Its groups, and its metrics.
            seconds: How long it took to collect.

        Raises:
            ValueError: A function leaves something that cannot be trained on.
            Exception: Whatever a function raises.
        """
        metrics = dict(scored.metrics)
        if self._removes_samples:
            metrics["rollout/removed_samples"] = Metric(self._remove(scored.groups), 1.0)
        if self._process is not None:
            everything = scored.generated or scored.groups
            self._process(self._args, [group.samples for group in everything], self._source)
        groups = scored.groups
        samples = [sample for group in groups for sample in group.samples]
        if (log := self._log) is not None:
            sortable = [*samples]  # the function may change the order
            name = f"{LOG} {self._log_path}"
            metrics = with_own_metrics(
                metrics, lambda extra: log(iteration, self._args, sortable, extra, seconds), name
            )
        if self._convert is not None:
            assert self._convert_path is not None
            groups = converted_groups(self._convert(self._args, samples), groups, self._convert_path)
        return replace(scored, groups=groups, metrics=metrics)

    def _remove(self, groups: Sequence[PromptGroup]) -> int:
        """Mark the samples that are not trained on; return how many there are.

        Their loss masks stay until advantages are made, since those may depend on lengths (``batch/convert.py``).
        """
        if self._filter is not None:
            self._filter(self._args, [group.samples for group in groups])
        removed = 0
        for sample in (sample for group in groups for sample in group.samples):
            if self._drops_zero_rewards and sample.reward == 0:
                sample.remove_sample = True
            if self._drops_truncated and sample.status is SampleStatus.TRUNCATED:
                sample.remove_sample = True
            removed += sample.remove_sample
            try:
                sample.check()
            except ValueError as error:
                raise ValueError(f"{FILTER} {self._filter_path}: {error}") from None
        return removed


def _load(path: str | None, flag: str) -> Callable[..., Any] | None:
    return None if path is None else load_function(path, flag)


# The user's own way to collect an iteration: ``--rollout-function-path``.


_ROLLOUT = "--rollout-function-path"


@dataclass(frozen=True)
class RolloutTools:
    """The tools of a rollout function.

    ``stream.draw(n)`` returns n prompts. Awaiting ``make_group(drawn)`` produces one scored group of
    ``--n-samples-per-prompt`` trajectories, as the built-in collector does; it is in the ``group`` of the result. The
    other attributes are for functions that generate or score groups themselves.
    """

    stream: TrainingStream
    make_group: Callable[[PromptGroup], Awaitable[ProducedGroup]]
    engine: Engine
    tokenizer: Any
    reward_function: RewardFunction
    rollout: RolloutArguments
    reward: RewardArguments


class RolloutFunction(Protocol):
    """Returns the scored groups of one iteration, ``--rollout-batch-size`` of them.

    To report additional metrics, it returns a ``miles.rollout.collect.Rollout(groups, metrics)``.
    """

    async def __call__(self, iteration: int, tools: RolloutTools) -> list[PromptGroup] | ScoredGroups:
        """Return the groups of ``iteration``, counted from 0."""


class FunctionCollector(GroupCollector):
    """Calls the user's function and checks its result."""

    def __init__(self, path: str, tools: RolloutTools) -> None:
        """Import the function. Raises ``ValueError`` if that is not possible."""
        super().__init__(tools.stream)  # between two iterations the function must not hold prompts back
        self._path = path
        self._function: RolloutFunction = load_function(path, _ROLLOUT)
        self._tools = tools

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the function's groups and metrics.

        Raises:
            ValueError: The result is not as ``RolloutFunction`` describes.
            Exception: Whatever the function raises.
        """
        answer: Any = await self._function(iteration, self._tools)
        scored = answer if isinstance(answer, ScoredGroups) else ScoredGroups(answer, {})
        self._check(scored.groups, iteration)
        metrics = rollout_metrics(scored.groups, scored.groups, 0, self._tools.reward.log_passrate)
        return replace(scored, metrics=metrics | scored.metrics)

    def _check(self, groups: Any, iteration: int) -> None:
        at = f"{_ROLLOUT} {self._path}: iteration {iteration}"
        if not isinstance(groups, list) or not all(isinstance(group, PromptGroup) for group in groups):
            raise ValueError(
                f"{at} is {groups!r:.80}; return a list of miles.types.sample.PromptGroup, or a Rollout of it"
            )
        wanted, per_group = self._tools.rollout.rollout_batch_size, self._tools.rollout.n_samples_per_prompt
        if len(groups) != wanted:
            raise ValueError(f"{at} has {len(groups)} groups; return as many as --rollout-batch-size {wanted}")
        for group in groups:
            trajectories = {sample.trajectory_id for sample in group.samples}
            if len(trajectories) + group.dropped_trajectories != per_group or None in trajectories:
                raise ValueError(
                    f"{at}: group {group.group_index} has the trajectory_ids {sorted(map(str, trajectories))}; give it "
                    f"--n-samples-per-prompt {per_group} trajectories, each with its own id"
                )
            if any(sample.reward is None for sample in group.samples):
                raise ValueError(f"{at}: group {group.group_index} has samples without a reward; score every sample")
            for sample in group.samples:
                sample.check()


# The user's own evaluation, ``--eval-function-path``, or own metrics of the built-in one.


EVAL = "--eval-function-path"
EVAL_LOG = "--custom-eval-rollout-log-function-path"


@dataclass(frozen=True)
class EvaluationTools:
    """The tools of an evaluation function.

    Awaiting ``evaluate_sets()`` evaluates as the run does without the function: it returns ``eval/…`` of every set, as
    numbers. The other attributes are for functions that generate or score on their own.

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


def as_metrics(result: Any, path: str) -> dict[str, Metric]:
    """Return the function's result as metrics.

    Raises:
        ValueError: It is not a mapping of names to finite numbers.
    """
    if not isinstance(result, Mapping):
        raise ValueError(f"{EVAL} {path}: returned {result!r:.80}; return numbers by name, such as {{'accuracy': 0.5}}")
    metrics = {}
    for name, value in result.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{EVAL} {path}: the metric {name} is {value!r:.80}; return finite numbers")
        metrics[f"eval/{str(name).removeprefix('eval/')}"] = Metric(float(value), 1.0)
    return metrics


Evaluation: TypeAlias = Callable[[int], Awaitable[dict[str, Metric]]]


def evaluation_of(settings: Settings, eval_sets: list[EvalSet], tools: GroupTools) -> Evaluation:
    """Return the evaluation of all sets at a version of the weights: the user's or the built-in one.

    Raises:
        ValueError: The user's function cannot be imported.
    """
    path = settings.evaluation.eval_function_path
    if path is None:
        return _built_in_evaluation(settings, eval_sets, tools)
    function: EvaluationFunction = load_function(path, EVAL)
    args = flags_view(settings)

    async def evaluate_sets() -> dict[str, float]:
        per_set = await evaluate(eval_sets, tools, settings.data.rollout_seed)
        return {name: metric.value for metrics, _ in per_set for name, metric in metrics.items()}

    async def call(version: int) -> dict[str, Metric]:
        tools_at_version = EvaluationTools(
            version, eval_sets, evaluate_sets, tools.engine, tools.tokenizer, tools.reward_function
        )
        return as_metrics(await function(args, tools_at_version), path)

    return call


def _built_in_evaluation(settings: Settings, eval_sets: list[EvalSet], tools: GroupTools) -> Evaluation:
    """Return the evaluation with the metrics of ``--custom-eval-rollout-log-function-path``, if it is given."""
    path = settings.evaluation.custom_eval_rollout_log_function_path
    function = None if path is None else load_function(path, EVAL_LOG)
    args = flags_view(settings)
    seed = settings.data.rollout_seed

    async def call(version: int) -> dict[str, Metric]:
        per_set = await evaluate(eval_sets, tools, seed)
        metrics = {name: metric for set_metrics, _ in per_set for name, metric in set_metrics.items()}
        if function is None:
            return metrics
        data = {
            eval_set.name: {
                "rewards": [sample.reward for sample in samples],
                "truncated": [sample.status is SampleStatus.TRUNCATED for sample in samples],
                "samples": samples,
            }
            for eval_set, (_, samples) in zip(eval_sets, per_set, strict=True)
        }
        return await user_code_in_thread(
            with_own_metrics, metrics, lambda extra: function(version, args, data, extra), f"{EVAL_LOG} {path}"
        )

    return call
