"""Tolerances for two computations of the same quantity, derived from the CPU's arithmetic.

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
little compared with sums of 32 or more terms.

A result of few operations is no random walk: its tolerance is the worst case, the number of roundings times ``UNIT``
times the magnitude. exp, log and the like count as 4 roundings, and exp(x) as x more, since an absolute error of x is a
relative error of exp(x). float64 has the unit 2^-53, so its tolerances show a computation that was done in fp32.

Use a constant with ``rel`` or ``rtol`` where nothing cancels, and with ``abs`` or ``atol`` for numbers around 1. Larger
terms that cancel: multiply it by their size. test_tolerance.py compares the tolerances with the errors of this CPU and
with faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

UNIT = 2.0**-24  # half the distance from 1 to the next fp32 number
DEVIATIONS = 4

FEW_ROUNDINGS = 16 * UNIT
"""Error of a number that a formula gives in fp32: a policy loss of a few tokens, its gradient, a weight, a metric.

16 roundings in a row, 9.5e-7: a log ratio and its exponential (8), powers and products with an advantage (4), a mean
over up to 5 tokens or samples (4).
"""

DOUBLE_ERROR = 1e-12
"""Error of a number around 1 that was computed in float64: 1000 roundings of numbers up to 9, 1000 * 2^-53 * 9."""

DEVIATION_ERROR = 2e-8
"""Error, in float64, of differences from a mean over their standard deviation + 1e-6.

Numbers up to 10 that are almost equal have no deviation, and 16 roundings are divided by 1e-6: 16 * 2^-53 * 10 / 1e-6.
"""

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

RUN_ERROR = 1e-4
"""Relative error of a metric of a short run of the suite's tiny model, in another layout or with another backend.

Its weights have a spread of 0.3, so its scores are 0.3^2 * 32 = 2.9, and gradients and ratios have a relative error of
``rounding_error(500, 1 + 2.9)``, 2.1e-5. Later steps start from weights that differ by ``adam_error`` of the steps
before: with a learning rate of 1e-3, 3 * 1e-3 * 1e-3, which is 1e-5 of the weights. Each adds to both.
"""

RUN_METRIC_ERROR = 1e-5
"""Absolute error of the same metrics, as ``METRIC_ERROR``: means of differences of log-probs.

One has an error of ``rounding_error(500, (1 + 2.9) * 1.7)``, 3.5e-5, with logits of 1.7; a step has at least 16 tokens,
so the mean has a fourth of it.
"""


def rounding_error(roundings: int, magnitude: float) -> float:
    """Return the largest absolute error that ``roundings`` fp32 roundings of numbers up to ``magnitude`` explain."""
    return DEVIATIONS * UNIT * math.sqrt(roundings) * magnitude


KIND_LOG_PROB_ERROR = rounding_error(800, 3.2)
"""Error of a log-prob of any model of tiny_kinds.py with a spread of 0.2, at a temperature of 0.8 or more: 2.2e-5.

It is at least the ``log_prob_error`` of each of them. The longest chain has four layers; scores are 0.2^2 * 32 = 1.3,
and logits over the temperature are around 1.4. Recurrent layers have no longer chains on less than 64 tokens.
"""


def digits(count: int) -> float:
    """Return the relative error of a number that was rounded to ``count`` significant digits: a unit of the last."""
    return 10.0 ** (1 - count)


def places(count: int) -> float:
    """Return the absolute error of a number that was rounded to ``count`` decimal places: a unit of the last."""
    return 10.0**-count


def log_softmax_error(logits: torch.Tensor) -> float:
    """Return the largest absolute error of a log-prob of given logits, already divided by the temperature.

    That is four roundings of a logit (quotient, difference from the largest, exponential, result), and the relative
    error of the sum over the vocabulary, which its logarithm makes absolute.
    """
    return rounding_error(4, logits.abs().max().item()) + rounding_error(logits.shape[-1], 1.0)


def attention_error(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, terms: int) -> float:
    """Return the largest absolute error of one attention over ``terms`` keys, by the sizes of its inputs.

    The last dimension of the tensors is the width of a head.
    """
    width = query.shape[-1]
    score = scaling * math.sqrt(width * query.square().mean().item() * key.square().mean().item())
    return rounding_error(width + terms, (1 + score) * value.abs().max().item())


def adam_error(lr: float, steps: int, gradient_error: float = 100 * RELATIVE_ERROR) -> float:
    """Return the largest absolute error of a weight after ``steps`` of Adam, alongside ``FEW_ROUNDINGS`` of the weight.

    Adam divides the mean gradient by the root of the mean square, so a step has the size ``lr`` however small the
    gradient is, and a relative error of the gradient is one of the step. Steps add up.

    Args:
        lr: The learning rate.
        steps: Steps where gradients had an error.
        gradient_error: Relative error of one element of the gradient; with a large epsilon, its absolute error over
            that. By default of gradients that were summed in another order: their error is relative to the typical
            element. The smallest of 10^4 root mean squares over two steps or more is a hundredth of the typical one.
    """
    return lr * steps * gradient_error


def roundings(config: Any, tokens: int) -> int:
    """Return the length of the chain of sums behind a logit: the residual stream runs through the sums of all layers.

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
        sequences: The token ids of whole sequences, each read on its own.
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
