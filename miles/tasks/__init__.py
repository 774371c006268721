"""The tasks to learn: prompts, rewards, environments and their tools."""
