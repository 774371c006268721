"""Tiny random models of any family, for checks that run in seconds."""
