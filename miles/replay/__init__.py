"""What an engine decided while it generated, in a compact form that the trainer can repeat."""
