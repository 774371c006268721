"""Megatron's model as policy and critic: layers, packed sequences, heads, log-probs."""
