"""Runs on disk: the settings and state in a run's folder, its checkpoints, and generating with its model."""
