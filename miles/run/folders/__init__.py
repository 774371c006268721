"""Folders that a run writes: locks, the run that owns them, the point to resume from, and errors of the disk."""
