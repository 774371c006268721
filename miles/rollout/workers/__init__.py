"""Groups made by several processes: ``--num-rollout-workers``."""
