"""miles: reinforcement-learning post-training of language models, from one command line."""

__version__ = "0.1.0"
