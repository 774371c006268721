"""The user's own advantages, made of the samples of an iteration: ``--custom-reward-post-process-path``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from miles.base.user_code.loading import load_function
from miles.config.flags_view import flags_view
from miles.config.settings import Settings
from miles.types.sample import Sample

FLAG = "--custom-reward-post-process-path"


class RewardPostProcess:
    """Calls ``function(args, samples)``, which returns ``(rewards, advantages)``, each with a number per sample.

    The advantages take the place of those that the estimator makes of rewards (phase 1). The first list is what other
    launchers log; metrics of rewards are those of the reward function here.
    """

    def __init__(self, path: str, settings: Settings) -> None:
        """Import the function. Raises ``ValueError`` if that is not possible."""
        self._path = path
        self._function = load_function(path, FLAG)
        self._args = flags_view(settings)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the advantages.

        Raises:
            ValueError: The function returns something else.
            Exception: Whatever it raises.
        """
        returned: Any = self._function(self._args, list(samples))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(f"{FLAG} {self._path}: returned {returned!r:.80}; return the rewards and the advantages")
        advantages = [float(advantage) for advantage in returned[1]]
        if len(advantages) != len(samples) or not all(math.isfinite(advantage) for advantage in advantages):
            raise ValueError(
                f"{FLAG} {self._path}: returned {len(advantages)} advantages for {len(samples)} samples, or one that "
                "is not finite; return one finite number per sample"
            )
        return advantages
