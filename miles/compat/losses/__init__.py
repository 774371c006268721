"""Call a whole loss of a related launcher, as slime: ``loss(args, batch, logits, sum_of_sample_mean)``."""
