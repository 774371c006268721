"""Prompt sets: reading, rendering, tokenizing, and the order in which prompts are drawn."""
