"""A run: the loop, Ray, placement, checkpoints, restarts. Nothing else imports Ray."""
