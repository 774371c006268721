"""Call the user's functions on the scored groups of an iteration, before these are converted for the trainer.

In this order: samples that are not trained on are marked, all samples are shown, metrics are logged, and samples are
replaced by what is trained on. Each function is given ``args``, the settings by their flags' names
(``miles/config/flags_view.py``), and samples in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from miles.base.user_code.loading import load_function
from miles.config.flags_view import flags_view
from miles.config.settings import Settings
from miles.rollout.collect import ScoredGroups
from miles.rollout.hooks import custom_convert
from miles.rollout.metrics import with_own_metrics
from miles.types.metrics import Metric
from miles.types.sample import PromptGroup, Sample, SampleStatus

FILTER = "--rollout-sample-filter-path"
PROCESS = "--rollout-all-samples-process-path"
LOG = "--custom-rollout-log-function-path"


class IterationHooks:
    """The functions that a run calls on each iteration; none of them by default."""

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
        self._filter_path, self._log_path = rollout.rollout_sample_filter_path, rollout.custom_rollout_log_function_path
        self._filter = _load(self._filter_path, FILTER)
        self._process = _load(rollout.rollout_all_samples_process_path, PROCESS)
        self._log = _load(self._log_path, LOG)
        self._convert_path = rollout.custom_convert_samples_to_train_data_path
        self._convert = _load(self._convert_path, custom_convert.FLAG)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._removes_samples or self._process or self._log or self._convert)

    @property
    def _removes_samples(self) -> bool:
        return self._filter is not None or self._drops_zero_rewards or self._drops_truncated

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
        if self._log is not None:
            metrics = self._logged(iteration, scored.groups, metrics, seconds)
        groups = scored.groups
        if self._convert is not None:
            assert self._convert_path is not None
            found = self._convert(self._args, [sample for group in groups for sample in group.samples])
            groups = custom_convert.converted_groups(found, groups, self._convert_path)
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
            self._check(sample)
        return removed

    def _check(self, sample: Sample) -> None:
        try:
            sample.check()
        except ValueError as error:
            raise ValueError(f"{FILTER} {self._filter_path}: {error}") from None

    def _logged(
        self, iteration: int, groups: Sequence[PromptGroup], metrics: dict[str, Metric], seconds: float
    ) -> dict[str, Metric]:
        """Return the metrics as the function leaves them (``with_own_metrics``)."""
        log = self._log
        assert log is not None
        samples = [sample for group in groups for sample in group.samples]
        return with_own_metrics(
            metrics,
            lambda extra: log(iteration, self._args, samples, extra, seconds),
            f"{LOG} {self._log_path}",
        )


def _load(path: str | None, flag: str) -> Callable[..., Any] | None:
    return None if path is None else load_function(path, flag)
