"""From prompts to scored groups: generation, rewards, filters, ordering and evaluation."""
