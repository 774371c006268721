"""The rewards that ``--rm-type`` names: one file each, found by its name.

A file ``NAME.py`` has a function ``NAME(samples: Sequence[Sample]) -> list[float]``, which may be ``async``. A run
imports only the file of the reward that it uses.
"""
