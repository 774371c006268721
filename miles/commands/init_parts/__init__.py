"""What ``miles init`` copies: rows and the reward of each task, with its test, and the template of run.yaml."""
