"""Metrics that carry their own reduction, the places they are written to, and the run report."""
