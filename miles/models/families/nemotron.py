"""Nemotron, through Megatron-Bridge: layer norms around 1, squared ReLU, heads that are rotated in part."""

from miles.models.base import Config, Family


class Nemotron(Family):
    """Part of each head is rotated, by default half of it."""

    def sliding_window(self, config: Config) -> int | None:
        """Return how many tokens back attention sees, or None if it sees all."""
        return config.get("sliding_window")

    def rotated_share(self, config: Config) -> float:
        """Return the part of each attention head, from its beginning, that rotary embedding rotates."""
        rope = {"partial_rotary_factor": 0.5} | config | (config.get("rope_parameters") or {})  # transformers' default
        share: float = rope["partial_rotary_factor"]
        return share


BRIDGED = (Nemotron("nemotron", activation="relu2"),)
