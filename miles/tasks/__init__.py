"""What is learned: prompts, rewards, environments and their tools."""
