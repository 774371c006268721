"""Flags of the Megatron backend: our own, and the fields of its dataclasses."""
