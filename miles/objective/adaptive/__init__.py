"""Weights of the loss that follow a target: of the KL, and of the entropy."""
