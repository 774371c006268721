"""GSPO (arXiv 2507.18071): GRPO's advantages with the policy loss ``gspo``, which has one ratio per sequence."""

from miles.objective.estimators.grpo import Grpo


class GspoEstimator(Grpo):
    """The same as ``--advantage-estimator grpo --policy-loss gspo``."""

    name = "gspo"
    summary = "grpo, with --policy-loss gspo by default"
    default_policy_loss = "gspo"
