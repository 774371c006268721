"""Environments: what a model talks to, turn by turn, and what says how well it did (``--environment``)."""
