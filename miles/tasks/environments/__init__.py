"""Environments: objects that a model talks to, turn by turn, and that reward it (``--environment``)."""
