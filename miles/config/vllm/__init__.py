"""Flags of vLLM servers: our own, and those that are passed on."""
