"""Read launch scripts that were written for related launchers: their flags, spellings and values."""
