"""Kernels of training for CPUs: the same results in an order that suits their caches."""
