"""Kernels of training for CPUs: the same results, computed in an order that suits their caches."""
