"""The experts that the routers of a model chose for each token: routing replay.

An array of ``[positions, layers, k]`` holds, for the positions of a sample from its first token on, the k experts of
each decoder layer; a layer without experts has zeros. The last token of a sample is generated and not read, so it has
none. That is one byte per token, layer and choice up to 256 experts, and two beyond: 48 layers of 8 choices take 384
bytes per token.
"""

from __future__ import annotations

import numpy as np

UNKNOWN = -1  # in a micro-batch: the router chooses by itself


def dtype_for(num_experts: int) -> type[np.generic]:
    """Return the smallest dtype that holds the number of every expert."""
    return np.uint8 if num_experts <= 256 else np.int16


def continued(first: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """Return the choices of a sample that was continued. ``more`` has those of all its positions, computed again.

    A position keeps the choice that was made when it was generated.
    """
    if first is None or more is None:
        return more if first is None else first
    return np.concatenate([first, more[len(first) :]])


def at_tokens(
    choices: list[np.ndarray], sample: np.ndarray, position: np.ndarray, layers: int, topk: int
) -> np.ndarray:
    """Return the choices of the tokens of a micro-batch, int16 [T, layers, k], ``UNKNOWN`` for tokens without choices.

    Args:
        choices: Those of each sample.
        sample: The sample of each token, int64 [T]; -1 for padding.
        position: Its position in the sample, int64 [T].
        layers: The decoder layers of the model.
        topk: k.
    """
    found = np.full((len(sample), layers, topk), UNKNOWN, np.int16)
    for number, of_sample in enumerate(choices):
        held = np.flatnonzero((sample == number) & (position < len(of_sample)))
        found[held] = of_sample[position[held]]
    return found
