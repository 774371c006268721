"""The version of miles, also in pyproject.toml."""

__version__ = "0.1.0"
