"""What a run computes: advantages, token losses and their weights, aggregation, KL and entropy."""
