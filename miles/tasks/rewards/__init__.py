"""Reward functions, and scoring samples with them."""
