"""The data that rooms exchange: samples, batches, metrics, weights, choices of an engine, the arithmetic of ranks."""
