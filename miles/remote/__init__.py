"""Folders in remote storage."""
