"""A step from only lengths; every number in it differs, so that a mix-up shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from miles.types.train_batch import TrainBatch


def _make_batch(lengths: Sequence[tuple[int, int]], scored: bool = True, advantages: bool = False) -> TrainBatch:
    """One sample for each (prompt, response) length; ``scored``: with log-probs and a critic's numbers."""
    rng = np.random.default_rng(len(lengths))
    n = len(lengths)

    def column() -> list[np.ndarray]:
        return [rng.normal(size=response).astype(np.float32) for _, response in lengths]

    return TrainBatch(
        tokens=[rng.integers(0, 1000, prompt + response) for prompt, response in lengths],
        response_lengths=[response for _, response in lengths],
        loss_masks=[rng.integers(0, 2, response).astype(np.float32) for _, response in lengths],
        rollout_log_probs=column(),
        rewards=[i + 0.5 for i in range(n)],
        sample_denoms=[i + 2.0 for i in range(n)],
        trajectory_token_counts=[i + 3.0 for i in range(n)],
        group_indices=[i // 2 for i in range(n)],
        trajectory_ids=[100 + i for i in range(n)],
        position_in_step=[200 + i for i in range(n)],
        num_trajectories=91,
        num_loss_tokens=93,
        expected_loss_mass=0.94,
        old_log_probs=column() if scored else None,
        ref_log_probs=column() if scored else None,
        values=column() if scored else None,
        advantages=column() if advantages else None,
        returns=column() if scored else None,
    )


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TrainBatch]:
    return _make_batch
