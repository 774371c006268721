"""Models: their families, tensor layouts, packing rules, and tiny random ones."""
