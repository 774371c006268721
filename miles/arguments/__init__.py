"""Flags: one frozen dataclass a section, parsed, validated and explained without importing torch."""
