"""Compare numbers of a step without regard to their last digits, which depend on the layout of the step."""

import numpy as np

FP32 = 4 * float(np.finfo(np.float32).eps)
"""Numbers that differ by less than this part of the largest are equal in fp32."""
FP64 = 64 * float(np.finfo(np.float64).eps)
"""The same in float64, after a sum over many numbers."""
SCORES = 1e-5
"""Log-probs and entropies, in nats, that differ by less are equal: an fp32 model rounds by about a tenth of it."""


def centred(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Return ``values - mean``, exactly 0 if the difference is within ``tolerance``, their rounding; float64.

    >>> centred(np.array([0.1, 0.1, 0.1]), tolerance=FP64).tolist()
    [0.0, 0.0, 0.0]
    """
    deviations = values - values.mean() if len(values) else values
    return np.where(np.abs(deviations) > tolerance, deviations, 0.0)


def magnitude(*columns: np.ndarray) -> float:
    """Return the largest absolute value, 0 if there is none."""
    return max(float(np.abs(column).max(initial=0.0)) for column in columns)


def largest(values: np.ndarray, number: int, tolerance: float) -> np.ndarray:
    """Return which are the ``number`` largest, bool [N]; of those within ``tolerance`` of the last one, the first.

    >>> largest(np.array([0.5, 0.1 + 1e-9, 0.1 + 2e-9, 0.1]), 2, tolerance=1e-6).tolist()
    [True, True, False, False]
    """
    if not len(values):
        return np.zeros(0, bool)
    bound = np.partition(values, -number)[-number]
    chosen: np.ndarray = values > bound + tolerance
    tied = np.flatnonzero(~chosen & (values >= bound - tolerance))
    chosen[tied[: number - int(chosen.sum())]] = True
    return chosen
