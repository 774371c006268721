"""Call a whole loss that was written for a related launcher: ``(args, batch, logits, sum_of_sample_mean)``."""
