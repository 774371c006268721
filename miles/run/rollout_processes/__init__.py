"""Processes that the rollout process starts, as Ray actors beside its own: servers and generation workers."""
