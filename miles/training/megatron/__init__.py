"""Megatron-Core: tensor, pipeline, context, expert and data parallel, on gloo and NCCL alike."""

import warnings

# When it is imported, Megatron warns of every optional package that is not there; nothing here needs one.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
