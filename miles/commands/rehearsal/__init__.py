"""Predict the needs of a run: trace the real model in the real layout, without weights and without GPUs."""
