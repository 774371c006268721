"""Rank arithmetic, and context parallelism: layout, process groups, dynamic sizes."""
