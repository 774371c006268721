"""Which rank and micro-batch every sample of a step goes to, and how a micro-batch is laid out."""
