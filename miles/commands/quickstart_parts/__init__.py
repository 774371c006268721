"""The run of ``miles quickstart``: its prompts, its model, its settings (quickstart.yaml) and its last line."""
