"""Compute the objective of a run: advantages, token losses and their weights, aggregation, KL and entropy."""
