"""Declare, parse, validate and explain the flags, without importing torch."""
