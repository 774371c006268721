"""Mixture of experts on Megatron: routing and its auxiliary losses."""
