"""This host: its GPUs, cores, memory and arithmetic. Nothing here imports torch."""
