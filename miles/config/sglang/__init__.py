"""Flags of SGLang servers: our own, and those that are passed on."""
