"""Tolerances for two fp32 computations of the same quantity, derived from the CPU's arithmetic.

The CPU determines the order of a sum, its width (SIMD lanes) and whether products are rounded before they are added, so
results differ between CPUs and between memory alignments. That is not a fault. On every IEEE CPU (x86 with or without
AVX-512 and AMX, ARM):

1. One operation has a relative error of at most ``UNIT`` = 2^-24. Errors of many operations are nearly independent and
   add up like the steps of a random walk (Higham and Mary, "A New Approach to Probabilistic Rounding Error
   Analysis", 2019): after n roundings, sqrt(n) * UNIT. A sum in lanes, in blocks or with fused multiply-add has shorter
   chains, so fewer roundings; the length of the sum is the upper bound for all CPUs.
2. A relative error times the magnitude of the rounded number is an absolute error.
3. A softmax turns an absolute error of its scores into a relative error of its probabilities: attention with scores of
   size s multiplies the relative error of its input by 1 + s. This happens once, not per layer, since large scores
   make probabilities of 0 and 1, which errors of the scores no longer change. Scores of random weights are about
   (spread * sqrt(width))^2, as queries and keys are each a sum of ``width`` terms of size ``spread``. The last softmax
   does not change the error of the logits: a log-prob is a difference of logits.
4. A test takes the largest of up to 10^4 errors, which is at 4 standard deviations for a normal distribution.

The tolerance is ``DEVIATIONS * UNIT * sqrt(roundings) * magnitude``, times 1 + s after attention. Nothing in it
depends on the CPU. Elementary functions (exp, log, rsqrt) have errors of 1 to 4 UNIT, a few times per layer, which is
little compared with sums of 32 or more terms. test_tolerance.py compares the tolerance with the errors of this CPU and
with faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

UNIT = 2.0**-24  # half the distance from 1 to the next fp32 number
DEVIATIONS = 4

RELATIVE_ERROR = 1e-5
"""Relative error of a gradient, by its norm, and of a metric, as documented in docs/loss-aggregation.md.

A gradient passes the chain of the forward pass (``roundings``: 400 in a model of two layers over 32 numbers, with
scores of 0.7) and one twice as long backward: 1.7 * sqrt(3 * 400) * UNIT = 3.5e-6. A norm averages over its elements,
so it is not the largest of many errors: 1e-5 is 3 standard deviations. Larger models would need more.
"""

METRIC_ERROR = 5e-6
"""Absolute error of a metric that log-probs are subtracted in: in a step of one token it is as large as a log-prob's.

That is ``rounding_error`` of 400 roundings of logits around 1, 4.8e-6, however small the difference.
"""

SERVER_LOG_PROB_ERROR = 1e-4
"""Error of a log-prob from an SGLang server in fp32, as docs/engine.md promises. ``log_prob_error`` is smaller."""


def rounding_error(roundings: int, magnitude: float) -> float:
    """Return the largest absolute error that ``roundings`` fp32 roundings of numbers up to ``magnitude`` explain."""
    return DEVIATIONS * UNIT * math.sqrt(roundings) * magnitude


def roundings(config: Any, tokens: int) -> int:
    """Return the length of the chain of sums behind a logit: the residual stream runs through those of all layers.

    Args:
        config: The transformers configuration of a decoder with full attention.
        tokens: Length of the longest sequence: terms of attention's sum over values.
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.hidden_size + head_dim + tokens + heads * head_dim  # queries and keys, scores, values, output
    mlp = config.hidden_size + config.intermediate_size  # up, down; the sums in experts are no longer
    return config.num_hidden_layers * (attention + mlp) + config.hidden_size


def log_prob_error(model: Any, sequences: Iterable[Sequence[int]], temperature: float = 1.0) -> float:
    """Return the largest absolute error of a log-prob, or of a logit over ``temperature``, that fp32 explains.

    Args:
        model: A transformers model of random weights, as its configuration draws them.
        sequences: The token ids of whole sequences, each read by itself.
        temperature: Divides the logits; 0 counts as 1, as for greedy responses.
    """
    longest, typical = 0, 0.0
    for tokens in sequences:
        ids = torch.as_tensor(tokens)
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits
        longest, typical = max(longest, len(ids)), max(typical, logits.square().mean().sqrt().item())
    score = model.config.initializer_range**2 * model.config.hidden_size
    return rounding_error(roundings(model.config, longest), (1 + score) * typical / (temperature or 1.0))
