"""Checkpoints of the Megatron backend: their contents, and how shards are written and read."""
