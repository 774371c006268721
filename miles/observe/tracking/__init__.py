"""Metrics that carry their own reduction, the sinks they are written to, and the run report."""
