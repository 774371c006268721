"""How far two fp32 computations of the same quantity may be apart: every tolerance that the CPU's arithmetic decides.

A CPU decides the order of a sum, its width (SIMD lanes) and whether products are rounded before they are added, so
results differ from one CPU to the next, and from one memory alignment to the next. None of this is a fault. What can
be said of every IEEE CPU (x86 with or without AVX-512 and AMX, ARM):

1. One operation has a relative error of at most ``UNIT`` = 2^-24. Errors of many operations are as good as independent,
   and add up like the steps of a random walk (Higham and Mary, "A New Approach to Probabilistic Rounding Error
   Analysis", 2019): after n roundings, sqrt(n) * UNIT. A sum in lanes, in blocks or with fused multiply-add has shorter
   chains, so fewer roundings; the length of the sum, one term after the other, is the upper end for all CPUs.
2. A relative error becomes an absolute one by the magnitude of what is rounded. It is the largest that occurs, not the
   typical one, which is a fourth of it: that covers the attention scores, of about the same size as the logits, whose
   softmax turns absolute errors into relative ones.
3. A test takes the largest of up to 10^4 errors, and that of a normal distribution is at 4 standard deviations.

The tolerance is ``DEVIATIONS * UNIT * sqrt(roundings) * magnitude``. Nothing in it depends on the CPU. Elementary
functions (exp, log, rsqrt) have errors of 1 to 4 UNIT, a few times per layer: little beside sums of 32 and more terms.
"""

from __future__ import annotations

import math
from typing import Any

UNIT = 2.0**-24  # half the distance from 1 to the next fp32 number
DEVIATIONS = 4


def rounding_error(roundings: int, magnitude: float) -> float:
    """Return the largest absolute error that so many fp32 roundings of numbers up to ``magnitude`` explain."""
    return DEVIATIONS * UNIT * math.sqrt(roundings) * magnitude


def log_prob_error(config: Any, tokens: int, largest_logit: float) -> float:
    """Return the largest absolute error of a log-prob that fp32 explains.

    The residual stream runs through every layer, so the sums of all layers are one chain. Log-softmax takes the error
    of the logits over as it is.

    Args:
        config: The transformers configuration of a decoder with full attention.
        tokens: Length of the longest sequence: terms of attention's sum over values.
        largest_logit: Largest absolute logit, divided by the temperature.
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.hidden_size + head_dim + tokens + heads * head_dim  # queries and keys, scores, values, output
    mlp = config.hidden_size + config.intermediate_size  # up, down; the experts of a token have no longer sums
    return rounding_error(config.num_hidden_layers * (attention + mlp) + config.hidden_size, largest_logit)
