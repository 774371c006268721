"""Rewards that punish an answer for its form, to be added to another one."""
