"""Folders that a run writes: who may, which run they belong to, where a run resumes, and why a write failed."""
