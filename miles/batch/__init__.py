"""From scored groups to train batches, to the shards and micro-batches of every rank, to tensors."""
