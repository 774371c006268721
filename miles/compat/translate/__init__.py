"""Translate the configuration of another trainer into our flags, and say what its objective computed.

``reading/`` turns a file into settings by name; ``launchers/`` has one file per trainer, with what each of its settings
means here; ``examples.py`` and ``reductions.py`` evaluate the objectives in plain floats; ``report.py`` prints.
"""
