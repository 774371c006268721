"""Translate the configuration of another trainer into our flags, and say what differs.

``reading.py`` turns a file, with those that it inherits from, into settings by name. ``launchers/`` has a file and a
table (TOML) for each trainer: its settings, their defaults and what they mean here. ``translation.py`` collects what
becomes of them, and evaluates aggregations in plain floats; ``miles/commands/translate.py`` prints.
"""
