"""``miles smoke``: a training command on a tiny random model, and what is expected of its metrics."""
