"""The choices of an engine during generation, in a compact form that the trainer can repeat."""
