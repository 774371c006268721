"""GSPO-token: GSPO's ratio of whole sequences, with an advantage for each token (arXiv 2507.18071, Eq. 13 and 14)."""

from miles.objective.policy_losses.gspo import Gspo


class GspoToken(Gspo):
    """``max(-s_t A_t, -clip(s_t) A_t)`` with ``s_t = sg(s) p_t / sg(p_t)`` and GSPO's ratio s of the sequence.

    The value of s_t is s, its gradient is the gradient of the token's own log-prob; ``sg`` stops the gradient. If all
    tokens of a sequence have the same advantage, ``gspo`` has the same value, clip and gradient, and is computed in
    this form too. So the two names differ only in what they promise: ``gspo`` is the paper's loss for estimators with
    one advantage per sequence, this is its loss for estimators that give each token its own, such as ppo.
    """

    name = "gspo_token"
    summary = "gspo with an advantage for each token; the same if a sequence has one"
    ratio = "sg(s) p / sg(p), s = exp(log p - log p_old) in its geometric mean over the sequence, sg() has no gradient"
