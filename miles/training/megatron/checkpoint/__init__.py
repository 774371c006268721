"""Checkpoints of the Megatron backend: what is saved, and how shards are written and read."""
