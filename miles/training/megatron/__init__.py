"""Megatron-Core: tensor, pipeline, context, expert and data parallel, on gloo and NCCL alike."""
