"""The batches of a case, as the rollout side makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from cases import Case, Row, groups_of, rows_of

from miles.batch.convert import convert
from miles.types.train_batch import TrainBatch


def batches_of(case: Case) -> list[TrainBatch]:
    """One batch per optimizer step; if the case is off-policy, with its scores."""
    rows = rows_of(case)
    per_step = case.trajectories_per_step or len({row.sample.trajectory_id for row in rows})
    batches = convert(
        groups_of(case, rows),
        loss=case.loss,
        global_batch_size=per_step,
        with_experts=case.routing is not None,
    )
    return [_scored(batch, rows, case) for batch in batches] if case.off_policy else batches


def batch_of(case: Case) -> TrainBatch:
    """The batch of a case of one step."""
    (batch,) = batches_of(case)
    return batch


def _scored(batch: TrainBatch, rows: Sequence[Row], case: Case) -> TrainBatch:
    """Add the old and reference log-probs and the old values of the case, found by each sample's tokens."""
    place = {(row.sample.trajectory_id, tuple(row.sample.tokens)): row.place for row in rows}
    indices = [place[r, tuple(t.tolist())] for r, t in zip(batch.trajectory_ids, batch.tokens, strict=True)]

    def column(name: str) -> list[np.ndarray]:
        return [np.asarray(case.scores[name][p], np.float32) for p in indices]

    values = column("values") if "values" in case.scores else None
    return replace(batch, old_log_probs=column("old"), ref_log_probs=column("ref"), values=values)
