"""What ``miles init`` copies: the reward of each task, with its test."""
