"""Hugging Face weights into and out of a sharded Megatron model."""
