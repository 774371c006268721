"""The flags of a run: sections, rules over several of them, files of settings, explanations. Imports no torch."""
