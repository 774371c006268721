"""Mistral, through Megatron-Bridge: Llama with a sliding window, unless the config states that there is none."""

from miles.models.base import Config, Family


class Mistral(Family):
    """Trained with full attention only."""

    def sliding_window(self, config: Config) -> int | None:
        """Return how many tokens back attention sees, or None if it sees all."""
        window: int | None = config.get("sliding_window", 4096)  # transformers' default
        return window


BRIDGED = (Mistral("mistral"),)
