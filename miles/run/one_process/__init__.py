"""A run in one process, without Ray."""
