"""The kind of an operation: what the table of a profile adds up."""

from __future__ import annotations

import re

from miles.profiling.process_trace import KERNELS, SPAN, Event

PYTHON = "python, between operations"
OTHER = "other operations"

# The first pattern that a name contains decides. Names are those of ATen, c10d, FSDP2 and of CUDA's kernels.
_KINDS = (
    ("communication", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_scatter|broadcast|record_param_comms"),
    ("attention", r"scaled_dot_product|flash|fmha|efficient_attention|packed_attention"),
    (
        "matrix products",
        r"::(mm|bmm|addmm|baddbmm|addbmm|_?linear|mkldnn_linear|_grouped_mm|_scaled_mm)$|gemm|cutlass|xmma",
    ),
    ("optimizer", r"adam|_foreach_|multi_tensor"),
    ("copies and casts", r"copy|::(cat|clone|to|contiguous|stack|chunk_cat)$|memcpy|CatArray"),
    ("filling", r"::(fill_|zero_|zeros|ones|full|masked_fill_?|zeros_like|ones_like)$|memset|FillFunctor"),
    ("indexing", r"index|gather|scatter|embedding|::(take|where|nonzero|sort|topk|unique)"),
    ("reductions", r"::(sum|mean|amax|max|min|logsumexp|norm|linalg_\w+|cumsum|all|any|var)$|softmax|reduce_kernel"),
    ("random numbers", r"exponential_|multinomial|uniform_|normal_|bernoulli|philox"),
    (
        "shapes and memory",
        r"::(empty\w*|as_strided|view|_unsafe_view|reshape|t|transpose|permute|slice|select|split\w*|expand|unsqueeze|"
        r"squeeze|detach_?|alias|narrow|resize_|unbind|chunk|set_|numpy_T|lift\w*|result_type|resolve_\w+|item|"
        r"_local_scalar_dense|is_nonzero|flatten|unflatten|new_\w+)$",
    ),
    (
        "elementwise",
        r"::(mul|add|sub|div|rsub|neg|exp|exp2|log|sqrt|rsqrt|pow|silu|gelu|relu|sigmoid|tanh|cos|sin|abs|clamp\w*|sign|"
        r"reciprocal|addcmul|addcdiv|lerp|square|ge|gt|le|lt|eq|ne|logical_\w+|bitwise_\w+|isfinite|isnan|maximum|minimum|"
        r"erf|fmod|remainder|floor|round|tril|triu|threshold)_?(_backward)?$|elementwise",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)
_BACKENDS = ("gloo:", "nccl:")  # PyTorch names their collectives by spans
_OF_AUTOGRAD = ("Backward", "Backward0")
KINDS = (*(kind for kind, _ in _KINDS), OTHER, PYTHON)


def kind_of(event: Event) -> str:
    """Return the kind of what an event does by itself.

    A span does Python between the operations within it, and so do autograd's own events.

    >>> kind_of(Event("aten::addmm", "cpu_op", "t", 0, 1)), kind_of(Event("aten::copy_", "cpu_op", "t", 0, 1))
    ('matrix products', 'copies and casts')
    """
    if event.category == SPAN and not event.name.startswith(_BACKENDS):
        return PYTHON
    if event.category not in KERNELS and ("evaluate_function" in event.name or event.name.endswith(_OF_AUTOGRAD)):
        return PYTHON
    return next((kind for kind, pattern in _PATTERNS if pattern.search(event.name)), OTHER)
