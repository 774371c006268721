"""Nemotron, through Megatron-Bridge: layer norms around 1, squared ReLU, heads that are rotated in part."""

from miles.models.base import Config, Family


class Nemotron(Family):
    """Part of each head is rotated."""

    def sliding_window(self, config: Config) -> int | None:
        """Return how many tokens back attention sees, or None if it sees all."""
        return config.get("sliding_window")


BRIDGED = (Nemotron("nemotron", activation="relu2", rotates_part=True),)
