"""A filter that will never be satisfied must stop the run, and say so."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

MIN_STALLED_BURSTS = 10  # a small prompt set is passed quickly: give chance a few tries
MAX_STALLED_BURSTS = 100  # a large one never is: stop all the same


class Epochs(Protocol):
    """What tells in which pass over the prompts the last one was drawn."""

    @property
    def epoch(self) -> int: ...


class FilterStallGuard:
    """Watches bursts of ``burst_size`` judged groups for a long stretch of which nothing was kept."""

    def __init__(self, stream: Epochs, filter_path: str, burst_size: int, batch_size: int) -> None:
        self._stream = stream
        self._filter_path = filter_path
        self._burst_size = burst_size
        self._batch_size = batch_size
        self._judged = 0  # groups of the burst under way
        self._kept_in_burst = 0
        self._stalled_bursts = 0  # bursts in a row of which nothing was kept, up to now
        self._since_epoch = 0  # the epoch in which the first of them began
        self._burst_epoch = 0  # that in which the burst under way began

    def judged(self, kept: bool) -> None:
        """One group was kept or dropped."""
        if self._judged == 0:
            self._burst_epoch = self._stream.epoch
        self._judged += 1
        self._kept_in_burst += kept
        if self._judged == self._burst_size:
            self._end_burst()

    def _end_burst(self) -> None:
        if self._kept_in_burst:
            self._stalled_bursts = 0
        else:
            if self._stalled_bursts == 0:
                self._since_epoch = self._burst_epoch
            self._stalled_bursts += 1
        self._judged = self._kept_in_burst = 0

    def check(self, iteration: int, kept: int, dropped: Counter[str]) -> None:
        """Raise ``ValueError`` when nothing was kept over a whole pass of ``MIN_STALLED_BURSTS`` or more, or over
        ``MAX_STALLED_BURSTS``. ``kept`` and ``dropped`` are those of the rollout under way."""
        # The stretch began somewhere within its first epoch, so the one after it is the first that it saw whole.
        saw_whole_pass = self._stream.epoch >= self._since_epoch + 2
        bursts = self._stalled_bursts
        if bursts < MIN_STALLED_BURSTS or not (saw_whole_pass or bursts >= MAX_STALLED_BURSTS):
            return
        drops = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        raise ValueError(
            f"--dynamic-sampling-filter-path {self._filter_path}: rollout {iteration} has {kept} of "
            f"{self._batch_size} groups, and the last {bursts} bursts of {self._burst_size} prompts brought none "
            f"(dropped in all: {drops}); check the reward, give prompts that the model solves sometimes, raise "
            f"--n-samples-per-prompt, or leave the filter out"
        )
