"""Everything that knows other launchers: their flags, spellings, functions, files and calling conventions."""
