"""Record the values of each token that the loss reads, for a few samples, for the report.

The rollout side chooses the samples (``TrainShard.recorded``). Their columns are copied on the device while the loss is
computed, and moved to the host after all steps of the iteration, so that no step waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from miles.objective.output import TokenValues
from miles.objective.sequences import whole_responses
from miles.types.train_batch import TokenColumns, TrainShard


@dataclass(frozen=True)
class _Kept:
    """Columns of one sample on the device, fp32 [response] each."""

    advantages: torch.Tensor
    log_probs: torch.Tensor
    log_ratios: torch.Tensor
    token_weights: torch.Tensor


class TokenRecorder:
    """Receives the values of every micro-batch of a policy step, and keeps those of the chosen samples."""

    def __init__(self) -> None:
        self._step = 0
        self._wanted: frozenset[int] = frozenset()
        self._kept: dict[tuple[int, int], _Kept] = {}

    def begin(self, step: int, shard: TrainShard | None) -> None:
        """Begin a step, counted from 0 within the iteration. None: nothing of it is recorded."""
        self._step = step
        self._wanted = frozenset() if shard is None else shard.recorded

    def take(self, values: TokenValues) -> None:
        """Keep the columns of the chosen samples of a micro-batch. Collective among the ranks that share it."""
        micro = values.micro
        chosen = [i for i, position in enumerate(micro.positions) if position in self._wanted]
        if not chosen:
            return
        columns = (micro.advantages, values.log_probs, values.log_ratios, values.token_weights)
        wholes = [whole_responses(column.detach().float(), micro) for column in columns]
        if micro.context.rank:
            return
        ends = list(accumulate(micro.response_lengths))
        for i in chosen:
            place = slice(ends[i] - micro.response_lengths[i], ends[i])
            self._kept[self._step, micro.positions[i]] = _Kept(*(whole[place].clone() for whole in wholes))

    def read(self) -> dict[tuple[int, int], TokenColumns]:
        """Return what was kept since the last call, by step in the iteration and position in the step."""
        kept, self._kept = self._kept, {}
        return {key: _on_host(columns) for key, columns in kept.items()}


def _on_host(kept: _Kept) -> TokenColumns:
    def read(column: torch.Tensor) -> np.ndarray:
        values: np.ndarray = column.cpu().numpy()
        return values

    ratios = np.exp(np.minimum(read(kept.log_ratios), 40.0))
    return TokenColumns(read(kept.advantages), read(kept.log_probs), ratios, read(kept.token_weights))
