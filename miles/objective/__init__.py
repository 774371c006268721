"""What a run computes: advantages, token losses, corrections, aggregation, KL and entropy."""
