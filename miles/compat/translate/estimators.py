"""Write an estimator with what it needs here, and a KL that is subtracted from rewards."""

from __future__ import annotations

from miles.compat.translate.translation import Translation
from miles.objective.estimators import ESTIMATORS

WHITENED = "advantages are whitened over the whole rollout there, over the tokens of a step here"


def write_estimator(translation: Translation, key: str, *words: str) -> None:
    """Record the estimator of ``key``, and that whitened advantages are whitened over other tokens."""
    if "--normalize-advantages" in words:
        translation.differ(key, WHITENED, *words)
    else:
        translation.carry(key, *words)


def write_kl_in_rewards(translation: Translation, key: str, coefficient: float) -> bool:
    """Record a KL that is subtracted from rewards there, in the loss if the estimator here does not read it.

    Returns:
        Whether it has a counterpart: it has none if the loss has a KL already.
    """
    words = translation.words
    name = words[words.index("--advantage-estimator") + 1] if "--advantage-estimator" in words else "grpo"
    if "kl_coef" in ESTIMATORS[name].reads:
        translation.carry(key, "--kl-coef", coefficient)
    elif "--use-kl-loss" in words:
        translation.miss(key, f"subtracted from rewards there, which {name} does not do here; the loss has a KL too")
        return False
    else:
        why = f"subtracted from rewards there, which {name} does not do here: it is a term of the loss"
        translation.differ(key, why, "--use-kl-loss", "--kl-loss-coef", coefficient)
    return True
